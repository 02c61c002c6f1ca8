"""What the hardware's codes and scales mean: the inverses of paceline/model/formats.py, for the tests alone."""

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 is the sign


def e2m1_elements(codes: Tensor) -> Tensor:
    """Returns the values of codes, fp32."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=codes.device)
    return table[codes.long()]


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Returns the codes of pack_e2m1."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def unswizzle_scales(swizzled: Tensor, shape: tuple[int, int]) -> Tensor:
    """Returns the bytes of (R, S) scales that swizzle_scales has ordered."""
    rows, columns = (-(-size // step) for size, step in zip(shape, (128, 4), strict=True))
    tiles = swizzled.view(torch.uint8).view(rows, columns, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(128 * rows, 4 * columns)[: shape[0], : shape[1]]
