"""
Every parameter's name, shape and group, from the model config alone; the model and the planner both stand on this.

Order is registration order in model/gpt.py; tests/model/test_gpt.py holds the two together.
"""

from dataclasses import dataclass
from math import prod

from paceline.config import ModelConfig

VE_GATE_CHANNELS = 12  # of the residual stream that open a layer's value embedding
SMEAR_GATE_CHANNELS = 24  # of the embedding that open the mixing with the token before
MUON_GROUPS = frozenset({"matrix"})


@dataclass(frozen=True)
class ParamShape:
    name: str
    shape: tuple[int, ...]
    group: str  # key of plan/scaling.py's settings

    @property
    def numel(self) -> int:
        return prod(self.shape)


def has_value_embed(layer: int, n_layer: int) -> bool:
    """Every second layer, the last one always."""
    return layer % 2 == (n_layer - 1) % 2


def param_shapes(model: ModelConfig) -> tuple[ParamShape, ...]:
    """All parameters, in registration order."""
    width, vocab = model.n_embd, model.padded_vocab_size
    q_width, kv_width = model.n_head * model.head_dim, model.n_kv_head * model.head_dim
    value_layers = [i for i in range(model.n_layer) if has_value_embed(i, model.n_layer)]
    shapes = [
        ParamShape("resid_lambdas", (model.n_layer,), "resid_lambdas"),
        ParamShape("x0_lambdas", (model.n_layer,), "x0_lambdas"),
        ParamShape("smear_lambda", (1,), "smear"),
        ParamShape("backout_lambda", (1,), "smear"),
        ParamShape("wte.weight", (vocab, width), "wte"),
    ]
    for i in range(model.n_layer):
        shapes += [
            ParamShape(f"h.{i}.attn.c_q.weight", (q_width, width), "matrix"),
            ParamShape(f"h.{i}.attn.c_k.weight", (kv_width, width), "matrix"),
            ParamShape(f"h.{i}.attn.c_v.weight", (kv_width, width), "matrix"),
            ParamShape(f"h.{i}.attn.c_proj.weight", (width, q_width), "matrix"),
        ]
        if i in value_layers:
            gate = (model.n_kv_head, min(VE_GATE_CHANNELS, width))
            shapes.append(ParamShape(f"h.{i}.attn.ve_gate.weight", gate, "matrix"))
        shapes += [
            ParamShape(f"h.{i}.mlp.c_fc.weight", (4 * width, width), "matrix"),
            ParamShape(f"h.{i}.mlp.c_proj.weight", (width, 4 * width), "matrix"),
        ]
    shapes += [ParamShape(f"value_embeds.{i}.weight", (vocab, kv_width), "value_embeds") for i in value_layers]
    shapes.append(ParamShape("lm_head.weight", (vocab, width), "lm_head"))
    shapes.append(ParamShape("smear_gate.weight", (1, min(SMEAR_GATE_CHANNELS, width)), "smear"))
    return tuple(shapes)


def num_params(model: ModelConfig) -> int:
    return sum(shape.numel for shape in param_shapes(model))


def matmul_params(model: ModelConfig) -> int:
    """Parameters that multiply every token: block matrices and lm_head; embedding lookups are free."""
    return sum(shape.numel for shape in param_shapes(model) if shape.group in ("matrix", "lm_head"))
