"""
The GPT that paceline trains: nanochat's recipe of July 2026, whole.

Rotary positions, RMSNorm without weights after the embedding, before attention and MLP, on q and k and at the end; ReLU^2 MLP;
value embeddings on every second layer; learned scalars that scale the residual stream and bring the embedding back; smear (each
token takes in some of the one before); backout (the middle of the stream is taken off its end); soft-capped logits in fp32; an
untied head; windowed attention by a pattern. What each is worth: nanochat's dev/LOG.md.

Activations are in compute_dtype whatever the weights are stored in; norms, softmax, scalars and the loss reduce in fp32. The
model knows nothing of optimizers, ranks or files. Its parameters are those of plan/shapes.py.
"""

# B rows, T tokens in a row, C n_embd, H n_head, K n_kv_head, D head_dim, V padded_vocab_size

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from paceline.config import ModelConfig
from paceline.errors import PlanError
from paceline.model.cpu_attention import causal_attention
from paceline.model.embedding import Embedding
from paceline.model.kv_cache import KVCache
from paceline.model.loss import nats_per_token, softcap, sum_of_nats
from paceline.model.pointwise import mix, relu_squared, rms_norm, rotary_norm
from paceline.plan.cost import window_sizes
from paceline.plan.shapes import SMEAR_GATE_CHANNELS, VE_GATE_CHANNELS, has_value_embed

ROTARY_BASE = 100_000
VE_GATE_MAX = 3.0

Rotary = tuple[Tensor, Tensor]  # cos and sin, (T, D) each
Mask = Tensor | BlockMask | None  # None: all earlier tokens


class Linear(nn.Linear):
    """Without bias; the weight is cast to the input's dtype, so fp32 and bf16 weights run alike."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: GPT.init_weights draws all weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.window = layer, window_sizes(config)[layer]
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.c_q = Linear(config.n_embd, config.n_head * config.head_dim)
        self.c_k = Linear(config.n_embd, config.n_kv_head * config.head_dim)
        self.c_v = Linear(config.n_embd, config.n_kv_head * config.head_dim)
        self.c_proj = Linear(config.n_head * config.head_dim, config.n_embd)
        self.gate_channels = min(VE_GATE_CHANNELS, config.n_embd)
        if has_value_embed(layer, config.n_layer):
            self.ve_gate = Linear(self.gate_channels, config.n_kv_head)

    def forward(self, x: Tensor, ve: Tensor | None, rotary: Rotary, mask: Mask, cache: KVCache | None) -> Tensor:
        """x: (B, T, C) normed; ve: (B, T, K*D) or None -> (B, T, C)."""
        heads, kv_heads = (*x.shape[:2], self.n_head, self.head_dim), (*x.shape[:2], self.n_kv_head, self.head_dim)
        q = rotary_norm(self.c_q(x).view(heads), *rotary)  # (B, H, T, D)
        k = rotary_norm(self.c_k(x).view(kv_heads), *rotary)  # (B, K, T, D)
        v = self.c_v(x).view(kv_heads)  # (B, T, K, D)
        if ve is not None:
            gate = VE_GATE_MAX * torch.sigmoid(self.ve_gate(x[..., : self.gate_channels]))  # (B, T, K)
            v = torch.addcmul(v, gate.unsqueeze(-1), ve.view(kv_heads))
        v = v.transpose(1, 2)  # (B, K, T, D)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # (B, K, all that is seen, D)
        y = attend(q, k, v, mask, window=self.window)  # (B, T, H, D)
        return cast(Tensor, self.c_proj(y.flatten(2)))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int) -> Tensor:
    """q: (B, H, T, D); k, v: (B, K, T, D) -> (B, T, H, D). One query alone sees every key given: the cache has picked them."""
    groups, several = q.shape[1] // k.shape[1], q.shape[2] > 1
    if several and q.device.type == "cpu":
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return causal_attention(q, k, v, window=window)
    if isinstance(mask, BlockMask):
        flex = cast(Callable[..., Tensor], flex_attention)
        flex = flex if torch.compiler.is_compiling() else compiled_flex_attention()
        y = flex(q, k, v, block_mask=mask, enable_gqa=groups > 1)
    else:
        causal = several and mask is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=groups > 1)
    return y.transpose(1, 2)


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    """Even in an eager model: uncompiled, FlexAttention holds all scores at once."""
    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=False))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.c_proj(relu_squared(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, ve: Tensor | None, rotary: Rotary, mask: Mask, cache: KVCache | None) -> Tensor:
        x = x + self.attn(rms_norm(x), ve, rotary, mask, cache)
        return cast(Tensor, x + self.mlp(rms_norm(x)))


class GPT(nn.Module):
    """Build it (on the meta device too), then init_weights or load_state_dict: until then its weights are arbitrary."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        compute_dtype: torch.dtype,
        logits_budget_bytes: int = 256 << 20,
        activation_checkpointing: bool = False,
        attention: Literal["sdpa", "flex"] = "sdpa",
    ):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.logits_budget_bytes = logits_budget_bytes
        self.activation_checkpointing = activation_checkpointing
        self.attention = attention
        self.windows = window_sizes(config)
        self.block_masks: dict[tuple[int, int], BlockMask] = {}  # (tokens, window) -> FlexAttention's mask
        vocab, kv_width = config.padded_vocab_size, config.n_kv_head * config.head_dim
        value_layers = [i for i in range(config.n_layer) if has_value_embed(i, config.n_layer)]
        self.wte = Embedding(vocab, config.n_embd)
        self.h = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.value_embeds = nn.ModuleDict({str(i): Embedding(vocab, kv_width) for i in value_layers})
        self.lm_head = Linear(config.n_embd, vocab)
        self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.smear_gate = Linear(min(SMEAR_GATE_CHANNELS, config.n_embd), 1)
        self.smear_lambda = nn.Parameter(torch.empty(1))
        self.backout_lambda = nn.Parameter(torch.empty(1))
        self.nats_per_token: Callable[..., Tensor] = nats_per_token
        self.sum_of_nats: Callable[..., Tensor] = sum_of_nats

    def forward(self, idx: Tensor, targets: Tensor, *, reduction: Literal["sum", "none"] = "sum") -> Tensor:
        """Nats of targets, (B, T) int64, -1 not counted: their sum, () fp32, or each one's, (B, T) fp32 without gradient."""
        x = self.hidden(idx).flatten(0, 1)  # (B*T, C)
        weight = self.lm_head.weight.to(x.dtype)
        options = {
            "vocab_size": self.config.vocab_size,
            "budget_bytes": self.logits_budget_bytes,
            "compiled": torch.compiler.is_compiling(),  # known here, while tracing; the loss runs outside the trace
        }
        if reduction == "none":
            return self.nats_per_token(x, weight, targets.flatten(), **options).view_as(targets)
        return self.sum_of_nats(x, weight, targets.flatten(), **options)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """nn.Module's, with the loss outside the graph: a compiler may keep its chunks alive. What takes a loss out of graphs
        takes a second to import, which a model that stays eager need not wait for."""
        disable = torch.compiler.disable
        self.nats_per_token, self.sum_of_nats = disable(nats_per_token), disable(sum_of_nats)  # type: ignore[no-untyped-call]
        super().compile(*args, **kwargs)

    def logits(self, idx: Tensor, *, cache: KVCache | None = None, newest_only: bool = False) -> Tensor:
        """(B, T, vocab_size) fp32, capped; with newest_only (B, 1, vocab_size), of the last token alone."""
        x = self.hidden(idx, cache=cache)
        return softcap(self.lm_head(x[:, -1:] if newest_only else x)[..., : self.config.vocab_size].float())

    def hidden(self, idx: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """(B, T, C): what lm_head reads. idx: (B, T) int64; with a cache, the tokens that follow those it holds."""
        num_tokens, before = idx.shape[1], cache.length if cache is not None else 0
        rotary = self.rotary(before, before + num_tokens, idx.device)
        masks = self.masks(num_tokens, idx.device, flex=self.attention == "flex" and cache is None)
        x = self.smear(rms_norm(self.wte(idx).to(self.compute_dtype)), cache)  # (B, T, C)
        x0, middle = x.view_as(x), x  # a tensor of its own: torch.compile cannot trace mix(x, x)
        lambdas = zip(self.resid_lambdas.unbind(), self.x0_lambdas.unbind(), strict=True)
        for i, (resid, again) in enumerate(lambdas):
            rest = (i, idx, resid, again, rotary, masks[self.windows[i]], cache)
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(self.layer, x, x0, *rest, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self.layer(x, x0, *rest)
            if i == self.config.n_layer // 2:
                middle = x
        if cache is not None:
            cache.length += num_tokens
        return rms_norm(x - self.backout_lambda.to(x.dtype) * middle)

    def layer(
        self,
        x: Tensor,
        x0: Tensor,
        i: int,
        idx: Tensor,
        resid: Tensor,
        again: Tensor,
        rotary: Rotary,
        mask: Mask,
        cache: KVCache | None,
    ) -> Tensor:
        ve = self.value_embeds[str(i)](idx).to(x.dtype) if str(i) in self.value_embeds else None  # (B, T, K*D)
        return cast(Tensor, self.h[i](mix(x, x0, resid, again), ve, rotary, mask, cache))

    def smear(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """Adds to each token's embedding a gated part of the one before; the first token of all has none before."""
        before = x[:, :-1]  # (B, T-1, C)
        if cache is not None:
            before = before if cache.last_embedding is None else torch.cat((cache.last_embedding, before), dim=1)
            cache.last_embedding = x[:, -1:]
        later = x[:, x.shape[1] - before.shape[1] :]
        gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(later[..., : self.smear_gate.in_features]))
        return torch.cat((x[:, : x.shape[1] - before.shape[1]], torch.addcmul(later, gate, before)), dim=1)

    def rotary(self, start: int, end: int, device: torch.device) -> Rotary:
        """Computed where it is used: nothing to move between devices, and no last position."""
        dim = self.config.head_dim
        speeds = ROTARY_BASE ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)  # (D/2,)
        angles = torch.outer(torch.arange(start, end, dtype=torch.float32, device=device), speeds)  # (T, D/2)
        cos, sin = angles.cos().to(self.compute_dtype), angles.sin().to(self.compute_dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, -sin), dim=-1)  # (T, D)

    def masks(self, num_tokens: int, device: torch.device, *, flex: bool) -> dict[int, Mask]:
        """One for each window; none where all earlier tokens are seen, and none on the CPU, whose attention knows windows.

        SDPA's are dense, which rules out a GPU's flash kernels; flex's are for one number of tokens, made once and kept. Call
        it before torch.compile, so that none is made within the graph.
        """
        if flex and device.type == "cpu":
            raise PlanError("FlexAttention trains on CUDA only and this is the CPU", fix="attention sdpa")
        if num_tokens > self.config.sequence_len:
            raise ValueError(f"{num_tokens} tokens in a row, the model takes {self.config.sequence_len}")
        masks: dict[int, Mask] = {}
        for window in set(self.windows):
            if window >= num_tokens or device.type == "cpu":
                masks[window] = None
            elif flex:
                if (num_tokens, window) not in self.block_masks:
                    self.block_masks[num_tokens, window] = sliding_block_mask(num_tokens, window, device)
                masks[window] = self.block_masks[num_tokens, window]
            else:
                at = torch.arange(num_tokens, device=device)
                back = at.unsqueeze(1) - at  # (T, T): how far key j lies before query i
                masks[window] = (back >= 0) & (back < window)
        return masks

    @torch.no_grad()
    def init_weights(self, *, seed: int) -> None:
        """The same bits on every rank, device and dtype: each parameter is drawn in fp32 on the CPU from (seed, its name)."""
        for name, p in self.named_parameters():
            p.copy_(initial_value(name, tuple(p.shape), self.config, seed=seed))


def sliding_block_mask(num_tokens: int, window: int, device: torch.device) -> BlockMask:
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window)

    return create_block_mask(seen, None, None, num_tokens, num_tokens, device=str(device))


def initial_value(name: str, shape: tuple[int, ...], config: ModelConfig, *, seed: int) -> Tensor:
    """fp32 on the CPU. Uniform matrices have the deviation of a normal one without its outliers."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    kind = name.removesuffix(".weight").rpartition(".")[2]
    bound = math.sqrt(3 / config.n_embd)
    value = torch.zeros(shape)
    if kind == "wte":
        return value.normal_(0, 0.8, generator=generator)
    if kind == "lm_head":
        return value.normal_(0, 0.001, generator=generator)
    if kind in ("ve_gate", "smear_gate"):
        return value.uniform_(0, 0.02, generator=generator)  # a little above neutral
    if kind == "c_fc":
        return value.uniform_(-0.4 * bound, 0.4 * bound, generator=generator)
    if kind == "resid_lambdas":
        return torch.linspace(1.15, 1.05, config.n_layer)
    if kind == "x0_lambdas":
        return torch.linspace(0.20, 0.05, config.n_layer)
    if kind == "backout_lambda":
        return value.fill_(0.2)
    if kind in ("c_proj", "smear_lambda"):
        return value  # zero: each block starts as the identity
    return value.uniform_(-bound, bound, generator=generator)  # c_q, c_k, c_v, value embeddings
