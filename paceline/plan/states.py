"""
What the states of an optimizer are in memory and in a checkpoint: fp32, or codes of 8 bits with a base for each block. No torch.

`--optimizer-states 8bit` gives codes to the states that have a number for each element (plan/algorithms.py), of every tensor but
the small ones, which are nothing beside the rest. A block is up to BLOCK elements of one row: whichever rows or matrices a rank
owns, it has whole blocks, so that world sizes have the same codes. What a code means: train/state_codes.py.
"""

from dataclasses import dataclass
from math import prod

from paceline.plan.algorithms import Algorithm, Shape
from paceline.plan.sharding import SMALL

BLOCK = 256  # elements at most that share a base: two bytes for it are then 0.06 bits of each
BASE = ".base"  # behind the name of a state: its blocks' bases
DTYPE_BYTES = {"float32": 4, "int16": 2, "int8": 1, "uint8": 1}
# read and written for each element to decode its code and to encode it again, by the ops of train/state_codes.py
CODEC_BYTES = {"int8": 222, "uint8": 162}
WORKING_COPIES = 2  # of 4 bytes for each element that is decoded or encoded, beside its fp32 value


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that a rank keeps from step to step. dtype: torch's name."""

    name: str
    shape: Shape
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


def has_codes(algorithm: Algorithm, shape: Shape) -> bool:
    """Returns whether the states of a parameter are codes."""
    return bool(algorithm.codes) and len(shape) > 1 and prod(shape) >= SMALL


def stored_states(algorithm: Algorithm, shape: Shape, *, rows: int) -> tuple[StoredTensor, ...]:
    """Returns what is kept of the states of some rows of a parameter, whose whole shape is `shape`."""
    codes = algorithm.codes if has_codes(algorithm, shape) else {}
    stored: list[StoredTensor] = []
    for name, shape_of in algorithm.states.items():
        state = shape_of((rows, *shape[1:]))
        stored.append(StoredTensor(name, state, codes.get(name, "float32")))
        if name in codes:
            stored.append(StoredTensor(name + BASE, (*state[:-1], state[-1] // block_size(state[-1])), "int16"))
    return tuple(stored)


def block_size(row_numel: int) -> int:
    """Returns the elements of a block: the most, up to BLOCK, that divide a row. A model's rows are multiples of its head_dim."""
    return next(size for size in range(min(BLOCK, row_numel), 0, -1) if row_numel % size == 0)


def decoded_bytes(algorithm: Algorithm, *, numel: int, largest: int) -> int:
    """Returns what an update of `numel` elements needs beside the codes: fp32 states, and the temporaries of the largest tensor."""
    return 4 * (len(algorithm.codes) * numel + WORKING_COPIES * largest)


def codec_bytes(algorithm: Algorithm, numel: int) -> int:
    """Returns the bytes that are moved in the device's memory to decode the states of `numel` elements and to encode them again."""
    return numel * sum(CODEC_BYTES[code] for code in algorithm.codes.values()) if numel >= SMALL else 0
