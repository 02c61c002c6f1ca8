"""
The GPT that paceline trains, as a model of Hugging Face transformers. `paceline export` copies this file beside the weights.

It imports torch and transformers alone: `AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)` needs no paceline. It
is the network of paceline/model/gpt.py in plain operations, with the same parameters under the same names; all its numbers are in
config.json. Norms, scalars and logits are computed in fp32, whatever the dtype of the weights. License: Apache-2.0.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

# B rows, T new tokens, S tokens with those in the cache, C hidden_size, H heads, K key/value heads, D head_dim, V vocab_size

NOT_SUPPORTED = ("inputs_embeds", "position_ids", "output_attentions", "output_hidden_states")  # arguments of forward


class PacelineConfig(PretrainedConfig):
    """The values of config.json, each an attribute. What transformers has no name for:

    windows: for each layer, how many tokens its attention sees, a token itself and those before it.
    value_embed_layers: the layers with a value embedding, which ve_gate_channels of the stream scale by at most ve_gate_max.
    smear_gate_channels: of an embedding, which scale how much of the previous token's is added to it.
    backout_layer: the layer whose output is subtracted at the end.
    rotary_base, qk_gain: of the angles of positions; of queries and keys after their norm.
    """

    model_type = "paceline"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]


def rms_norm(x: Tensor, eps: float, *, gain: float = 1.0) -> Tensor:
    """Returns x divided by its root mean square along the last dim, times gain, in x.dtype."""
    return x * (torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


class PacelineAttention(nn.Module):
    """Causal attention of one layer, with QK norm and, in some layers, gated value embeddings."""

    def __init__(self, config: PacelineConfig, layer: int):
        super().__init__()
        self.config, self.layer, width = config, layer, config.hidden_size
        self.c_q = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.c_k = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.c_v = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.c_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=False)
        if layer in config.value_embed_layers:
            self.ve_gate = nn.Linear(config.ve_gate_channels, config.num_key_value_heads, bias=False)

    def forward(
        self, x: Tensor, ve: Tensor | None, rotary: Tensor, mask: Tensor | None, cache: DynamicCache | None
    ) -> Tensor:
        """Returns (B, T, C). x: (B, T, C) normed; ve: (B, T, K*D) or None; rotary, mask: those of the model's functions."""
        config, heads = self.config, (*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (linear(x).view(heads) for linear in (self.c_q, self.c_k, self.c_v))  # (B, T, H or K, D)
        q, k = (rms_norm(t, config.rms_norm_eps, gain=config.qk_gain) for t in (q, k))
        cos, sin = rotary.to(q.dtype)
        q, k = (t * cos + t.roll(config.head_dim // 2, -1) * sin for t in (q, k))
        if ve is not None:
            gate = config.ve_gate_max * torch.sigmoid(self.ve_gate(x[..., : config.ve_gate_channels]))  # (B, T, K)
            v = v + gate.unsqueeze(-1) * ve.view(heads)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)  # (B, K, S, D)
        causal, shared = mask is None and q.shape[2] > 1, q.shape[1] > k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class PacelineMLP(nn.Module):
    """The MLP of one layer, with ReLU^2: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: PacelineConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=False)
        self.c_proj = nn.Linear(4 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class PacelineBlock(GradientCheckpointingLayer):
    """One layer: attention and MLP, each of the normed stream and added to it. Arguments: the attention's, and x the stream."""

    def __init__(self, config: PacelineConfig, layer: int):
        super().__init__()
        self.eps, self.attn, self.mlp = config.rms_norm_eps, PacelineAttention(config, layer), PacelineMLP(config)

    def forward(
        self, x: Tensor, ve: Tensor | None, rotary: Tensor, mask: Tensor | None, *, past_key_values: Any
    ) -> Tensor:
        x = x + self.attn(rms_norm(x, self.eps), ve, rotary, mask, past_key_values)
        return x + self.mlp(rms_norm(x, self.eps))


class PacelineForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole network."""

    config_class = PacelineConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _input_embed_layer = "wte"
    # bf16 would make 1.0469 of 1.05, in every layer and for every token alike
    _keep_in_fp32_modules_strict = ("resid_lambdas", "x0_lambdas", "smear_lambda", "backout_lambda")

    def __init__(self, config: PacelineConfig):
        super().__init__(config)
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.wte = nn.Embedding(config.vocab_size, width)
        self.h = nn.ModuleList(PacelineBlock(config, layer) for layer in range(config.num_hidden_layers))
        tables = {str(layer): nn.Embedding(config.vocab_size, kv_width) for layer in config.value_embed_layers}
        self.value_embeds = nn.ModuleDict(tables)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(config.num_hidden_layers))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.num_hidden_layers))
        self.smear_gate = nn.Linear(config.smear_gate_channels, 1, bias=False)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.zeros(1))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Returns logits, (B, T, V) fp32, of the last logits_to_keep tokens, 0 for all; with labels, (B, T), the mean loss too.

        input_ids: (B, T) int64, after the tokens of past_key_values. attention_mask: (B, S), 0 for padding at either end of a row.
        labels: as input_ids, -100 where there is no loss. use_cache=True makes a cache where none is given.
        """
        values = {name: kwargs.pop(name, None) for name in NOT_SUPPORTED}
        if refused := [name for name, value in values.items() if value is not None and value is not False]:
            raise ValueError(f"this model does not take {' and '.join(refused)}")
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        if past_key_values is not None and not isinstance(past_key_values, DynamicCache):
            raise ValueError(f"this model takes a DynamicCache, not a {type(past_key_values).__name__}")
        config, past = self.config, 0 if past_key_values is None else past_key_values.get_seq_length()
        total = past + input_ids.shape[1]  # S
        if attention_mask is not None and attention_mask.shape != (len(input_ids), total):
            raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, not {(len(input_ids), total)}")
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None  # a kernel without a mask is faster
        rotary = self.rotary(past, total, attention_mask)
        masks = {window: self.make_mask(past, total, window, attention_mask) for window in set(config.windows)}
        x = x0 = middle = self.embed(input_ids, past, attention_mask, past_key_values)  # (B, T, C)
        for i, block in enumerate(self.h):
            # learned scalars: how much of the stream a layer keeps, and how much of the bare token it sees again
            x = (self.resid_lambdas[i].float() * x + self.x0_lambdas[i].float() * x0).to(x.dtype)
            ve = self.value_embeds[str(i)](input_ids) if i in config.value_embed_layers else None  # (B, T, K*D)
            x = block(x, ve, rotary, masks[config.windows[i]], past_key_values=past_key_values)
            middle = x if i == config.backout_layer else middle
        # backout: what the first half of the layers wrote for the second half to read is of no use to lm_head
        x = rms_norm((x - self.backout_lambda.float() * middle).to(x.dtype), config.rms_norm_eps)
        logits = self.lm_head(x[:, -logits_to_keep:]).float() / config.final_logit_softcapping
        logits = config.final_logit_softcapping * torch.tanh(logits)  # (B, T or logits_to_keep, V)
        loss = None
        if labels is not None:  # token t predicts label t + 1
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def embed(self, input_ids: Tensor, past: int, attention_mask: Tensor | None, cache: DynamicCache | None) -> Tensor:
        """Returns the normed embeddings, (B, T, C), to which smear adds a gated part of the previous token's.

        The first token of a row, after padding, has no previous one. The cache has the token ids as keys of one more layer, so that
        they follow all that `generate` does to it: beams, repeats, crops.
        """
        tokens = input_ids
        if cache is not None:
            if len(cache.layers) == len(self.h):  # made for the layers of the config
                cache.layers.append(DynamicLayer())
            keys = input_ids[:, None, :, None]  # (B, 1, T, 1)
            tokens = cache.update(keys, keys[..., :0], len(self.h))[0][:, 0, max(0, past - 1) :, 0]  # (B, T or T + 1)
        x = rms_norm(self.wte(tokens), self.config.rms_norm_eps)
        before, after = x[:, :-1], x[:, 1:]
        gate = self.smear_lambda.float() * torch.sigmoid(self.smear_gate(after[..., : self.smear_gate.in_features]))
        if attention_mask is not None:
            gate = gate * attention_mask[:, -x.shape[1] : -1].unsqueeze(-1)
        smeared = after + gate.to(x.dtype) * before
        return smeared if past else torch.cat((x[:, :1], smeared), dim=1)

    def rotary(self, past: int, total: int, attention_mask: Tensor | None) -> Tensor:
        """Returns cos and sin of the new tokens' positions, (2, B or 1, T, 1, D) fp32. Positions count from a row's first token."""
        positions = torch.arange(total, device=self.wte.weight.device).unsqueeze(0)  # (1, S)
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)  # (B, S)
        pairs = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=positions.device)  # (D/2,)
        angles = positions[:, past:, None, None] * self.config.rotary_base ** (-pairs / self.config.head_dim)
        cos, sin = angles.cos(), angles.sin()  # (B or 1, T, 1, D/2): a pair is (d, d + D/2)
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((sin, -sin), -1)))

    def make_mask(self, past: int, total: int, window: int, attention_mask: Tensor | None) -> Tensor | None:
        """Returns which keys each new token sees, (B or 1, 1, T, S); None: all of them up to itself."""
        if attention_mask is None and total <= window and past in (0, total - 1):
            return None
        at = torch.arange(total, device=self.wte.weight.device)
        back = at[past:, None] - at  # (T, S): how far key j lies before query i
        mask = ((back >= 0) & (back < window))[None, None]
        if attention_mask is not None:  # padding sees itself, since softmax over no key is NaN
            mask = mask & attention_mask[:, None, None].bool() | (back == 0)
        return mask

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise NotImplementedError(
            "the vocabulary of this model is fixed: its value embeddings have a row for each token"
        )
