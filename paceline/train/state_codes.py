"""
Optimizer states in 8 bits, for `--optimizer-states 8bit`: a code for each element, and a base for each block of a row.

A number's first 12 bits in fp32 are its sign, its exponent and 3 bits of its mantissa. Without the sign they are an integer that
grows with the number, by 8 for each power of two. A code is that integer less the block's base. `uint8`, for squares, holds 32
powers of two below a block's largest number. A square that is too small for that becomes the smallest one, never 0: no gradient is
divided by far less than it should be. `int8` is a sign and the code of |x| + FLOOR, whose base is FLOOR's own integer: 0 is code 0,
and numbers below FLOOR, 14 powers of two under the block's largest, have steps of equal size.

Rounding is stochastic, since a mean that moves by a thousandth a step would otherwise never leave its code. Its random bits are a
hash of the number's own bits and the step: they need no state and do not depend on where a number lies, or on which rank. All is
arithmetic on integers but one sum, so that any device has the same codes. Block-wise states: arXiv 2110.02861, whose codes come
from a table and are rounded to the nearest. Which states have codes: plan/states.py.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from paceline.plan.states import BASE

# ... rows or matrices, n elements of a row in b blocks

MANTISSA_BITS = 3
SHIFT = 23 - MANTISSA_BITS  # bits of fp32 that a code leaves out
EXPONENT = 0xFF << 23
FLOOR = 14 << MANTISSA_BITS  # codes from there to the power of two of the block's largest; 9 more reach beyond it
NOT_A_NUMBER = 0x7FC00000  # with other NaNs, which are larger integers, the sum with random bits could overflow
LARGEST_CODE = 255  # of uint8
STEP_KEY, MIXERS = 0x9E3779B9, (0x7FEB352D, 0x846CA68B - (1 << 32))  # odd numbers of Weyl and of the hash lowbias32


def decode(codes: Tensor, bases: Tensor) -> Tensor:
    """Returns the numbers of codes, (..., n) fp32. codes: (..., n) uint8 or int8. bases: (..., b) int16."""
    code, base = codes.view(*bases.shape, -1).to(torch.int32), bases.unsqueeze(-1)  # (..., b, n/b) and (..., b, 1)
    if codes.dtype == torch.uint8:
        return fp32_of(code.add_(base)).view(codes.shape)
    values = fp32_of(code.abs().add_(base)).sub_(fp32_of(base.to(torch.int32)))
    return values.mul_(code.sign_()).view(codes.shape)


def encode_(x: Tensor, codes: Tensor, bases: Tensor, *, step: int) -> None:
    """Writes the codes of numbers, and their blocks' bases. x: (..., n) fp32, none below 0 where codes are uint8."""
    x = x.view(*bases.shape, -1)  # (..., b, n/b)
    bits = x.view(torch.int32)
    code = random_bits(bits, step=step)  # before all else: it needs most memory
    if codes.dtype == torch.uint8:
        round_(code, bits.clamp(max=NOT_A_NUMBER))
        base = (code.amax(dim=-1, keepdim=True) - LARGEST_CODE).clamp_(min=0)  # (..., b, 1)
        code.sub_(base).clamp_(min=0)
    else:
        top = x.abs().amax(dim=-1, keepdim=True).view(torch.int32) & EXPONENT
        base = ((top >> SHIFT) - FLOOR).clamp_(min=1 << MANTISSA_BITS)  # no less than the smallest normal number
        round_(code, x.abs().add_(fp32_of(base.clone())).view(torch.int32).clamp_(max=NOT_A_NUMBER))
        sign = bits >> 31  # -1 or 0
        code.sub_(base).bitwise_xor_(sign).sub_(sign)
    codes.view(code.shape).copy_(code)
    bases.copy_(base.squeeze(-1))


def round_(noise: Tensor, bits: Tensor) -> None:
    """Turns random bits into the integers of numbers without a sign, rounded up or down by these bits."""
    noise.add_(bits).bitwise_right_shift_(SHIFT)


def fp32_of(integers: Tensor) -> Tensor:
    """Returns the numbers of these integers; int32, overwritten."""
    return integers.bitwise_left_shift_(SHIFT).view(torch.float32)


def random_bits(bits: Tensor, *, step: int) -> Tensor:
    """Returns integers from 0 to 2**SHIFT - 1, (...) int32, that depend on bits and step alone: a hash of both."""
    key = (step * STEP_KEY) & 0xFFFFFFFF
    word = bits ^ (key - (1 << 32) if key >> 31 else key)
    word.bitwise_xor_(word >> 16).mul_(MIXERS[0])
    word.bitwise_xor_(word >> 15).mul_(MIXERS[1])  # which wraps around
    return word.bitwise_right_shift_(32 - SHIFT).bitwise_and_((1 << SHIFT) - 1)


def is_coded(dtype: torch.dtype) -> bool:
    """Returns whether a state's tensor holds codes."""
    return dtype in (torch.uint8, torch.int8)


def decoded(stored: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns the states in fp32 for an update. stored: by name, in the algorithm's order; fp32 ones are returned as they are."""
    return [
        decode(tensor, stored[name + BASE]) if is_coded(tensor.dtype) else tensor
        for name, tensor in stored.items()
        if not name.endswith(BASE)
    ]


def encode_states(states: Iterable[Tensor], stored: Mapping[str, Tensor], *, step: int) -> None:
    """Writes what an update has made of `decoded` back; fp32 states were changed in place."""
    names = [name for name in stored if not name.endswith(BASE)]
    for name, state in zip(names, states, strict=True):
        if is_coded(stored[name].dtype):
            encode_(state, stored[name], stored[name + BASE], step=step)


def load_states(stored: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Fills the states. read: returns what a checkpoint has under a name, on the CPU: fp32, or codes whose bases have their own."""
    for name in (name for name in stored if not name.endswith(BASE)):
        saved, state = read(name), stored[name]
        if saved.dtype == state.dtype and is_coded(saved.dtype):
            stored[name + BASE].copy_(read(name + BASE))
        elif is_coded(saved.dtype):
            saved = decode(saved, read(name + BASE))
        elif is_coded(state.dtype):
            bases = torch.empty(stored[name + BASE].shape, dtype=torch.int16)
            codes = torch.empty(state.shape, dtype=state.dtype)
            encode_(saved, codes, bases, step=0)
            stored[name + BASE].copy_(bases)
            saved = codes
        state.copy_(saved)
