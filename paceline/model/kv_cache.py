"""
Keys and values of the tokens a generation has seen, so that each new token costs one row of work.

Each layer keeps as many tokens as its window sees, in a ring: memory is fixed and generation may go on past sequence_len. Positions
go on counting, since rotary attention knows only differences.
"""

# B rows, T new tokens, K n_kv_head, D head_dim

import torch
from torch import Tensor

from paceline.config import ModelConfig
from paceline.plan.cost import window_sizes


class KVCache:
    def __init__(self, config: ModelConfig, *, num_rows: int, dtype: torch.dtype, device: torch.device):
        sizes = [(num_rows, config.n_kv_head, window, config.head_dim) for window in window_sizes(config)]
        self.k = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        self.v = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        self.last_embedding: Tensor | None = None  # (B, 1, C), which the next token smears in
        self.length = 0  # tokens seen

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps k and v, (B, K, T, D), and returns all that the newest token may attend to.

        T > 1 only while the cache is empty: then that is k and v themselves, under the layer's mask.
        """
        num_new, size = k.shape[2], self.k[layer].shape[2]
        assert num_new == 1 or self.length == 0, "several tokens at once only on an empty cache"
        kept = min(num_new, size)
        end = self.length + num_new
        slots = torch.arange(end - kept, end, device=k.device) % size
        self.k[layer][:, :, slots] = k[:, :, -kept:]
        self.v[layer][:, :, slots] = v[:, :, -kept:]
        if num_new > 1:
            return k, v
        seen = min(end, size)
        return self.k[layer][:, :, :seen], self.v[layer][:, :, :seen]

    def repeat(self, num_rows: int) -> None:
        """One row becomes num_rows equal ones."""
        assert self.last_embedding is not None, "nothing seen yet"
        self.k = [k.repeat(num_rows, 1, 1, 1) for k in self.k]
        self.v = [v.repeat(num_rows, 1, 1, 1) for v in self.v]
        self.last_embedding = self.last_embedding.repeat(num_rows, 1, 1)
