"""
The rows of step s, as a pure function of (seed, s).

Each epoch is a permutation of all rows, computed for just the positions asked for: no shuffled list in memory, no
state to save, the same rows whatever the world size. Integer arithmetic only, so every platform gives the same rows.

The permutation is a Feistel network on a grid of rows x columns just larger than num_rows, and what falls outside is
permuted again until it is inside: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002 (the generalized
Feistel and cycle walking). The round function is the finalizer of SplitMix64 (Steele et al., OOPSLA 2014).
"""

import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

MAX_ROWS = 1 << 40
ROUNDS = 6  # four make a Feistel network look random; two more for domains of a few rows

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of SplitMix64
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


def rows_of_step(step: int, *, rows_per_step: int, num_rows: int, seed: int) -> Int64s:
    """(rows_per_step,) int64: the rows of step `step`, counted from 0. Every row comes exactly once an epoch.

    A step may end one epoch and begin the next; with fewer rows than rows_per_step it holds several epochs.
    """
    assert step >= 0 and rows_per_step >= 1 and 1 <= num_rows <= MAX_ROWS
    positions = np.arange(step * rows_per_step, (step + 1) * rows_per_step, dtype=np.uint64)
    epochs, places = np.divmod(positions, np.uint64(num_rows))
    return _permute(places, _keys(epochs, seed=seed), num_rows=num_rows).astype(np.int64)


def batch_of_step(step: int, passed_over: Collection[int]) -> int:
    """The batch that step `step` takes: batch b holds the rows of step b of a run that passes over none.

    Steps move up over the batches passed over. Those before the first of them take what they always took, so a run that
    goes back to a checkpoint and passes over a later batch is the run that had passed over it from the start.
    """
    batch = step
    for passed in sorted(set(passed_over)):
        batch += passed <= batch
    return batch


def micro_batch_rows(
    step_rows: Int64s, *, micro_step: int, rank: int, world_size: int, device_batch_size: int
) -> Int64s:
    """(device_batch_size,) int64: what one rank takes in one micro-step; together they take the step's rows once."""
    start = (micro_step * world_size + rank) * device_batch_size
    assert 0 <= rank < world_size and start + device_batch_size <= len(step_rows)
    return step_rows[start : start + device_batch_size]


def _permute(places: UInt64s, keys: UInt64s, *, num_rows: int) -> UInt64s:
    """Each place in [0, num_rows) to another, by the permutation its key stands for."""
    columns = math.isqrt(num_rows - 1) + 1
    lines = -(-num_rows // columns)  # lines * columns exceeds num_rows by less than one line
    permuted = _feistel(places, keys, lines=lines, columns=columns)
    while (outside := np.flatnonzero(permuted >= num_rows)).size:
        permuted[outside] = _feistel(permuted[outside], keys[outside], lines=lines, columns=columns)
    return permuted


def _feistel(places: UInt64s, keys: UInt64s, *, lines: int, columns: int) -> UInt64s:
    """A bijection of [0, lines * columns): each round shifts one coordinate by a hash of the other."""
    line, column = np.divmod(places, np.uint64(columns))
    for number in range(1, ROUNDS + 1):
        round_keys = keys + np.uint64(number * GOLDEN & 0xFFFFFFFFFFFFFFFF)
        if number % 2:
            line = (line + _mix(round_keys ^ column) % np.uint64(lines)) % np.uint64(lines)
        else:
            column = (column + _mix(round_keys ^ line) % np.uint64(columns)) % np.uint64(columns)
    return line * np.uint64(columns) + column


def _keys(epochs: UInt64s, *, seed: int) -> UInt64s:
    """One key for each (seed, epoch); the seed is mixed first, so seed 1 epoch 0 is not seed 0 epoch 1."""
    seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)  # an array: numpy warns when a scalar wraps
    return _mix(_mix(seeds + np.uint64(GOLDEN)) + epochs)


def _mix(x: UInt64s) -> UInt64s:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))
