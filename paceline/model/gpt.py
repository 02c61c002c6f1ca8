"""
The GPT that paceline trains: nanochat's recipe of July 2026, whole.

Rotary positions; RMSNorm without weights; ReLU^2 MLP; value embeddings on every second layer; learned scalars that scale the
residual stream and bring the embedding back; smear; backout; soft-capped logits; an untied head; windowed attention. The reason
for each stands at its line. What each is worth: nanochat's dev/LOG.md.

Activations are in compute_dtype whatever the weights are stored in; norms, softmax, scalars and the loss reduce in fp32. The
model does not depend on optimizers, ranks or files. Its parameters are those of plan/shapes.py.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Collection
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.config import ModelConfig
from paceline.errors import PlanError
from paceline.model.attention import KVCache, Mask, attend, make_mask
from paceline.model.layers import (
    Embedding,
    compile_once,
    mix,
    nats_per_token,
    never_fall_back,
    relu_squared,
    rms_norm,
    rotary_norm,
    softcap,
    sum_of_nats,
)
from paceline.model.linear import Linear, LowProducts
from paceline.plan.shapes import has_value_embed, layer_matrices, smear_gate_width, ve_gate_width, window_sizes

# B rows, T tokens in a row (with a cache: new tokens), C n_embd, H n_head, K n_kv_head, D head_dim, V padded_vocab_size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by the precision of a plan
ROTARY_BASE = 100_000  # the slowest pair of dimensions turns less than once in 100,000 tokens
VE_GATE_MAX = 3.0  # a value embedding may outweigh the value that attention computes

Pair = tuple[Tensor, Tensor]  # cos and sin, (T, D) each; or a layer's two scalars
save_inputs = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # and call again in backward


class Attention(nn.Module):
    """Causal attention of one layer, over all earlier tokens or a window of them."""

    def __init__(self, config: ModelConfig, layer: int, way: str):
        super().__init__()
        self.layer, self.window, self.way = layer, window_sizes(config)[layer], way
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.c_q = Linear(config.n_embd, config.n_head * config.head_dim)
        self.c_k = Linear(config.n_embd, config.n_kv_head * config.head_dim)
        self.c_v = Linear(config.n_embd, config.n_kv_head * config.head_dim)
        self.c_proj = Linear(config.n_head * config.head_dim, config.n_embd)
        self.gate_channels = ve_gate_width(config)
        if has_value_embed(layer, config.n_layer):
            self.ve_gate = Linear(self.gate_channels, config.n_kv_head)

    def forward(self, x: Tensor, ve: Tensor | None, rotary: Pair, mask: Mask, cache: KVCache | None) -> Tensor:
        """Returns (B, T, C). x: (B, T, C) normed; ve: the layer's value embeddings, (B, T, K*D), or None."""
        heads, kv_heads = (*x.shape[:2], self.n_head, self.head_dim), (*x.shape[:2], self.n_kv_head, self.head_dim)
        # the norm on q and k bounds the scores, so no large logit saturates softmax early on; rotation makes a score depend on the
        # distance of two tokens alone
        q = rotary_norm(self.c_q(x).view(heads), *rotary)  # (B, H, T, D)
        k = rotary_norm(self.c_k(x).view(kv_heads), *rotary)  # (B, K, T, D)
        v = self.c_v(x).view(kv_heads)  # (B, T, K, D)
        if ve is not None:
            # what a token is, straight from a table: parameters that cost no FLOPs, gated by what stands there now
            gate = VE_GATE_MAX * torch.sigmoid(self.ve_gate(x[..., : self.gate_channels]))  # (B, T, K)
            v = torch.addcmul(v, gate.unsqueeze(-1), ve.view(kv_heads))
        v = v.transpose(1, 2)  # (B, K, T, D)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # (B, K, all visible tokens, D)
        y = attend(q, k, v, mask, window=self.window, way=self.way)  # (B, T, H, D)
        return cast(Tensor, self.c_proj(y.flatten(2)))


class MLP(nn.Module):
    """The MLP of one layer: four times as wide inside, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, T, C). x: (B, T, C) normed."""
        return self.second(self.c_fc(x))

    def second(self, x: Tensor) -> Tensor:
        """Returns (B, T, C). x: (B, T, 4C), what the first matrix makes."""
        return cast(Tensor, self.c_proj(relu_squared(x)))


class Block(nn.Module):
    """One layer: the stream is mixed with the embedding, then attention and MLP are added, each of the normed stream."""

    def __init__(self, config: ModelConfig, layer: int, attention: str, checkpointing: bool | str):
        super().__init__()
        self.attn = Attention(config, layer, attention)
        self.mlp = MLP(config)
        self.checkpointing = checkpointing

    def forward(
        self, x: Tensor, x0: Tensor, ve: Tensor | None, lambdas: Pair, rotary: Pair, mask: Mask, cache: KVCache | None
    ) -> Tensor:
        """Returns the stream after the layer, (B, T, C). x: the stream; x0: the embedding; lambdas: () fp32; ve: as attention's.

        All that differs between layers is a tensor or a mask: compiled by itself, it is compiled once for each kind of layer.
        """
        # the scalars let each layer choose how much of the stream it keeps, and how much of the bare token it sees again
        x = mix(x, x0, *lambdas)
        x = x + self.attn(rms_norm(x), ve, rotary, mask, cache)
        normed, rung = rms_norm(x), self.checkpointing if torch.is_grad_enabled() else False
        if rung == "relu":
            return x + cast(Tensor, save_inputs(self.mlp.second, self.mlp.c_fc(normed)))
        return x + cast(Tensor, save_inputs(self.mlp, normed) if rung == "mlp" else self.mlp(normed))


class GPT(nn.Module):
    """The whole network. Its weights are arbitrary until init_weights or load_state_dict; it may be built on the meta device."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        compute_dtype: torch.dtype,
        logits_budget_bytes: int = 256 << 20,
        activation_checkpointing: bool | str = False,
        attention: str = "sdpa",
    ):
        """attention: one of config.ATTENTION; a CPU takes sdpa."""
        super().__init__()
        self.config, self.compute_dtype, self.attention = config, compute_dtype, attention
        self.logits_budget_bytes, self.activation_checkpointing = logits_budget_bytes, activation_checkpointing
        self.windows = window_sizes(config)
        self.block_masks: dict[tuple[int, int], Mask] = {}  # (tokens, window) -> FlexAttention's mask
        self.rotary_tables: dict[torch.device, Pair] = {}  # of whole rows
        vocab, kv_width = config.padded_vocab_size, config.n_kv_head * config.head_dim
        value_layers = [i for i in range(config.n_layer) if has_value_embed(i, config.n_layer)]
        self.wte = Embedding(vocab, config.n_embd)
        blocks = (Block(config, i, attention, activation_checkpointing) for i in range(config.n_layer))
        self.h = nn.ModuleList(blocks)
        self.value_embeds = nn.ModuleDict({str(i): Embedding(vocab, kv_width) for i in value_layers})
        self.lm_head = Linear(config.n_embd, vocab)
        self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.smear_gate = Linear(smear_gate_width(config), 1)
        self.smear_lambda = nn.Parameter(torch.empty(1))
        self.backout_lambda = nn.Parameter(torch.empty(1))
        self.nats_per_token: Callable[..., Tensor] = nats_per_token
        self.sum_of_nats: Callable[..., Tensor] = sum_of_nats
        self.compiled = False
        self.fused_loss = False  # by model/kernels.py; see layers.fused_loss_problem
        self.passage: Callable[[int, Tensor], Tensor] | None = None
        self.first_value: Callable[[str], Tensor] | None = None  # where the parameters have no memory
        self.low_products: LowProducts | None = None
        self.compile_part: Callable[..., Callable[..., Any]] | None = None  # makes each part of the forward a graph

    def forward(
        self,
        idx: Tensor,
        targets: Tensor,
        *,
        reduction: Literal["sum", "none"] = "sum",
        grad_scale: Tensor | None = None,
    ) -> Tensor:
        """Returns the nats of targets, (B, T) int64 with -1 not counted: their sum, () fp32; or with "none" (B, T) fp32.

        grad_scale: () fp32, by which the gradient of the sum is multiplied, not the sum.
        """
        x = self.hidden(idx).flatten(0, 1)  # (B*T, C)
        weight = self.lm_head.weight.to(x.dtype)
        options = {
            "vocab_size": self.config.vocab_size,
            "budget_bytes": self.logits_budget_bytes,
            "compiled": self.compiled,
            "fused": self.fused_loss,
        }
        if reduction == "sum":
            nats = self.sum_of_nats(x, weight, targets.flatten(), **options, grad_scale=grad_scale)
        else:
            nats = self.nats_per_token(x, weight, targets.flatten(), **options).view_as(targets)
        return self.enter(len(self.h) + 2, nats)

    def compile(self, *args: Any, by_block: bool = False, **kwargs: Any) -> None:
        """Compiles the forward as nn.Module.compile does, as one graph; by_block: each layer as a graph of its own.

        One graph has all its gradients at the end of its backward. By block a layer's are complete before the backward of the layer
        below begins, so that they can be sent under it. The loss stays outside: a compiler may keep its chunks alive.
        """
        self.compiled = True
        if by_block:
            self.compile_part = functools.partial(compile_once, backend=kwargs.get("backend", "inductor"))
            return
        # torch.compiler.disable takes a second to import, so it is called here: an eager model does not wait for it
        disable = torch.compiler.disable
        self.nats_per_token, self.sum_of_nats = disable(nats_per_token), disable(sum_of_nats)  # type: ignore[no-untyped-call]
        super().compile(*args, **kwargs)
        never_fall_back()

    def use_low_products(
        self,
        recipe: str,
        num_layers: int,
        *,
        without: Collection[str] = (),
        native: bool,
        keeps_codes: bool,
        device: torch.device,
    ) -> LowProducts:
        """Makes the products of the first layers low ones; those of gates, embeddings and lm_head stay in 16 bits.

        without: names of plan/shapes.py: layer_matrices, whose products stay in 16 bits too.
        """
        names = [name for name in layer_matrices(self.config) if name not in without]
        layers = [cast(Linear, block.get_submodule(name)) for block in self.h[:num_layers] for name in names]
        return LowProducts(layers, recipe, native=native, keeps_codes=keeps_codes, device=device)

    def uncompile(self) -> None:
        """Makes the model eager again."""
        self.compiled, self.compile_part, self._compiled_call_impl = False, None, None

    def logits(self, idx: Tensor, *, cache: KVCache | None = None, newest_only: bool = False) -> Tensor:
        """Returns capped logits, (B, T, vocab_size) fp32; with newest_only (B, 1, vocab_size), those of the last token alone."""
        x = self.hidden(idx, cache=cache)
        logits = self.lm_head(x[:, -1:] if newest_only else x)[..., : self.config.vocab_size]
        return self.enter(len(self.h) + 2, softcap(logits.float()))

    def hidden(self, idx: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Returns what lm_head reads, (B, T, C). idx: (B, T) int64; with a cache, the tokens that follow those it holds."""
        num_tokens, before = idx.shape[1], cache.length if cache is not None else 0
        rotary = self.rotary(before, before + num_tokens, idx.device)
        masks = self.masks(num_tokens, idx.device, cached=cache is not None)
        x: Tensor = self.part(GPT.stem, cache)(self, self.wte(self.enter(0, idx)), cache)  # (B, T, C)
        x0 = middle = x.view_as(x)  # a tensor of its own: torch.compile cannot trace mix(x, x)
        lambdas = zip(self.resid_lambdas.unbind(), self.x0_lambdas.unbind(), strict=True)
        for i, pair in enumerate(lambdas):
            inputs = (self.enter(i + 1, x), x0, i, idx, pair, rotary, masks[self.windows[i]], cache)
            recompute = self.activation_checkpointing is True and torch.is_grad_enabled()
            x = save_inputs(self.layer, *inputs) if recompute else self.layer(*inputs)
            if i == self.config.n_layer // 2:
                middle = x.view_as(x)
        if cache is not None:
            cache.length += num_tokens
        return self.enter(len(self.h) + 1, self.part(GPT.backout, cache)(self, x, middle))

    def enter(self, part: int, x: Tensor) -> Tensor:
        """Returns x, and gathers the weights of a part where they come and go: 0 the stem, then the layers, the head, the end."""
        return self.passage(part, x) if self.passage else x

    def layer(
        self, x: Tensor, x0: Tensor, i: int, idx: Tensor, lambdas: Pair, rotary: Pair, mask: Mask, cache: KVCache | None
    ) -> Tensor:
        """Returns the stream after layer i, (B, T, C); its other inputs are the block's."""
        # looked up outside of the block: its graph would depend on i, and round the table's gradient to the table's dtype
        ve = self.value_embeds[str(i)](idx).to(x.dtype) if str(i) in self.value_embeds else None  # (B, T, K*D)
        block = self.part(Block.forward, cache)
        return cast(Tensor, block(self.h[i], x, x0, ve, lambdas, rotary, mask, cache))

    def part(self, function: Callable[..., Any], cache: KVCache | None) -> Callable[..., Any]:
        """Returns a part of the forward, compiled where the model is so by block; with a cache, which grows, it is eager."""
        return self.compile_part(function) if self.compile_part and cache is None else function

    def stem(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """Returns what the first layer reads, (B, T, C). x: the tokens' embeddings, (B, T, C)."""
        # the norm makes rare tokens, whose embeddings are hardly trained, as large as frequent ones
        return self.smear(rms_norm(x.to(self.compute_dtype)), cache)

    def backout(self, x: Tensor, middle: Tensor) -> Tensor:
        """Returns what lm_head reads, (B, T, C). x, middle: the stream at the end and after half of the layers."""
        # what the first half of the layers wrote for the second half to read is of no use to lm_head, and is taken off
        return rms_norm(mix(x, middle, None, -self.backout_lambda[0]))

    def smear(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """Adds to each token's embedding a gated part of the previous one; the very first token has no previous one.

        Pairs of tokens are then known to the first layer, which otherwise spends attention heads on looking one token back.
        """
        before = x[:, :-1]  # (B, T-1, C)
        if cache is not None:
            before = before if cache.last_embedding is None else torch.cat((cache.last_embedding, before), dim=1)
            cache.last_embedding = x[:, -1:]
        after = x[:, x.shape[1] - before.shape[1] :]  # the tokens that have a previous one
        gate = self.smear_lambda * torch.sigmoid(self.smear_gate(after[..., : self.smear_gate.in_features])).float()
        smeared = torch.addcmul(after, gate.to(x.dtype), before)
        return torch.cat((x[:, : x.shape[1] - before.shape[1]], smeared), dim=1)

    def rotary(self, start: int, end: int, device: torch.device) -> Pair:
        """Returns cos and sin of positions start to end, (T, D) each in compute_dtype.

        There is no last position. Those of whole rows are made once: call this before torch.compile, whose kernels would compute
        them again in every layer.
        """
        whole = (start, end) == (0, self.config.sequence_len)
        if whole and device in self.rotary_tables:
            return self.rotary_tables[device]
        dim = self.config.head_dim
        speeds = ROTARY_BASE ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)  # (D/2,)
        angles = torch.outer(torch.arange(start, end, dtype=torch.float32, device=device), speeds)  # (T, D/2)
        cos, sin = angles.cos().to(self.compute_dtype), angles.sin().to(self.compute_dtype)
        tables = torch.cat((cos, cos), dim=-1), torch.cat((sin, -sin), dim=-1)  # (T, D)
        # a tensor of a graph, or of inference mode, would be of no use to training
        if whole and not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
            self.rotary_tables[cos.device] = tables  # "cuda" has become "cuda:0"
        return tables

    def masks(self, num_tokens: int, device: torch.device, *, cached: bool = False) -> dict[int, Mask]:
        """Returns make_mask for each window. cached: of a prompt, whose number of tokens is any: FlexAttention's would be compiled.

        FlexAttention's are made once and kept: call this before torch.compile, so that none is made within the graph.
        """
        if self.attention != "sdpa" and device.type == "cpu":
            raise PlanError(f"attention {self.attention} is for GPUs and this is the CPU", fix="attention sdpa")
        if num_tokens > self.config.sequence_len:
            raise ValueError(f"{num_tokens} tokens in a row, the model takes {self.config.sequence_len}")
        if self.attention == "flex" and not cached:
            for window in set(self.windows):
                if (num_tokens, window) not in self.block_masks:
                    self.block_masks[num_tokens, window] = make_mask(num_tokens, window, device, way="flex")
            return {window: self.block_masks[num_tokens, window] for window in set(self.windows)}
        way = "sdpa" if self.attention == "flex" else self.attention
        return {window: make_mask(num_tokens, window, device, way=way) for window in set(self.windows)}

    @torch.no_grad()
    def init_weights(self, *, seed: int) -> None:
        """Draws all weights, the same bits on every rank, device and dtype: fp32 on the CPU from (seed, parameter's name)."""
        for name, p in self.named_parameters():
            p.copy_(initial_value(name, tuple(p.shape), self.config, seed=seed))


def initial_value(name: str, shape: tuple[int, ...], config: ModelConfig, *, seed: int) -> Tensor:
    """Returns a parameter's first value, fp32 on the CPU; uniform matrices deviate as a normal one without its outliers."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    kind = name.removesuffix(".weight").rpartition(".")[2]
    bound = math.sqrt(3 / config.n_embd)
    value = torch.zeros(shape)
    match kind:
        case "wte":
            return value.normal_(0, 0.8, generator=generator)
        case "lm_head":  # nearly uniform predictions: the first loss is that of a guess
            return value.normal_(0, 0.001, generator=generator)
        case "ve_gate" | "smear_gate":  # a little above neutral
            return value.uniform_(0, 0.02, generator=generator)
        case "c_fc":
            return value.uniform_(-0.4 * bound, 0.4 * bound, generator=generator)
        case "resid_lambdas":
            return torch.linspace(1.15, 1.05, config.n_layer)
        case "x0_lambdas":
            return torch.linspace(0.20, 0.05, config.n_layer)
        case "backout_lambda":
            return value.fill_(0.2)
        case "c_proj" | "smear_lambda":  # zero: each block starts as the identity
            return value
    return value.uniform_(-bound, bound, generator=generator)  # c_q, c_k, c_v, value embeddings
