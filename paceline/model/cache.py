"""The keys and values that a generation keeps, for model/gpt.py. It does not depend on the model's layers or weights."""

import torch
from torch import Tensor

from paceline.config import ModelConfig
from paceline.plan.cost import window_sizes

# B rows, T new tokens, C n_embd, K n_kv_head, D head_dim


class KVCache:
    """Keys and values of the tokens that a generation has read, so that each new token costs one row of work.

    Each layer keeps as many tokens as its window sees, in a ring: memory is fixed and generation may continue past sequence_len.
    Positions continue to count, since rotary attention depends only on differences.
    """

    def __init__(self, config: ModelConfig, *, num_rows: int, dtype: torch.dtype, device: torch.device):
        sizes = [(num_rows, config.n_kv_head, window, config.head_dim) for window in window_sizes(config)]
        self.k = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        self.v = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        self.last_embedding: Tensor | None = None  # (B, 1, C), which the next token smears in
        self.length = 0  # tokens read

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v, (B, K, T, D), and returns all keys and values that the newest token may attend to.

        T > 1 is allowed only while the cache is empty: it then returns k and v themselves, for use under the layer's mask.
        """
        num_new, size = k.shape[2], self.k[layer].shape[2]
        assert num_new == 1 or self.length == 0, "several tokens at once only on an empty cache"
        num_stored = min(num_new, size)
        end = self.length + num_new
        slots = torch.arange(end - num_stored, end, device=k.device) % size
        self.k[layer][:, :, slots] = k[:, :, -num_stored:]
        self.v[layer][:, :, slots] = v[:, :, -num_stored:]
        if num_new > 1:
            return k, v
        num_visible = min(end, size)
        return self.k[layer][:, :, :num_visible], self.v[layer][:, :, :num_visible]

    def repeat(self, num_rows: int) -> None:
        """Makes num_rows equal rows of the one row."""
        assert self.last_embedding is not None, "the cache is empty"
        self.k = [k.repeat(num_rows, 1, 1, 1) for k in self.k]
        self.v = [v.repeat(num_rows, 1, 1, 1) for v in self.v]
        self.last_embedding = self.last_embedding.repeat(num_rows, 1, 1)
