"""
Bits per byte on held-out text: unlike loss, comparable between tokenizers, and the same number at any world size.
"""

# B rows in a micro-batch, T tokens in a row, V vocab_size

import math

import numpy as np
import torch
from torch import Tensor

from paceline.data.rows import TokenSplit
from paceline.errors import PacelineError
from paceline.model.gpt import GPT
from paceline.train.dist import all_reduce_sum
from paceline.train.loader import to_device


@torch.no_grad()
def val_bpb(
    model: GPT,
    split: TokenSplit,
    *,
    token_bytes: Tensor,
    max_tokens: int,
    device_batch_size: int,
    rank: int,
    world_size: int,
) -> float:
    """Over at most max_tokens of the split, evenly spread over it, always the same rows.

    token_bytes: (V,) int64, UTF-8 length of each token, 0 for special tokens: those do not count.
    Collective: every rank must call it, and every rank gets the same number.
    """
    sequence_len, device = model.config.sequence_len, token_bytes.device
    mine = eval_rows(split.num_rows(sequence_len), max_rows=max(1, max_tokens // sequence_len))[rank::world_size]
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # nats, bytes
    for start in range(0, len(mine), device_batch_size):
        arrays = split.rows(mine[start : start + device_batch_size], sequence_len)
        idx, targets = (to_device(array, device) for array in arrays)  # (B, T) int64
        nats = model(idx, targets, reduction="none")  # (B, T) fp32
        size = token_bytes[targets.clamp_min(0)] * (targets >= 0)  # (B, T) int64
        sums[0] += (nats * (size > 0)).sum(dtype=torch.float64)
        sums[1] += size.sum()
    all_reduce_sum(sums)  # sums first, one division last: a mean of per-rank means weighs ranks wrongly
    total_nats, total_bytes = sums.tolist()
    if not total_bytes:
        raise PacelineError("the held-out text has no bytes to score", fix="more text, or another --data")
    return float(total_nats / (math.log(2) * total_bytes))


def eval_rows(num_rows: int, *, max_rows: int) -> np.ndarray:
    """All rows, or max_rows of them at even distances: (n,) int64."""
    count = min(num_rows, max_rows)
    return np.arange(count, dtype=np.int64) * num_rows // count
