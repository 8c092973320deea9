"""How codes and words lie in bytes, in PyTorch: functions without branches on data or loops over it.

``csrc/cpu/planes.h`` states the same layout. Codes are split into planes of 8, 4, 2 and 1 bits, low bits first, so that
no code straddles a byte; in a plane of ``width`` bits and ``stride`` bytes, byte j holds elements j, j + stride,
j + 2 stride, ... from the low bits up, so that no element moves across lanes of a vector register.
"""

from collections.abc import Iterator

import torch


def _planes(bits: int) -> Iterator[tuple[int, int]]:
    """Yield (width, offset) of the planes that a code is split into, low bits first."""
    offset = 0
    for width in (8, 8, 4, 2, 1):
        if bits - offset >= width:
            yield width, offset
            offset += width


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (groups, group_size), of any integer dtype, into bytes (groups, group_size * bits / 8)."""
    groups, group_size = codes.shape
    planes = []
    for width, offset in _planes(bits):
        parts = (codes >> offset & (1 << width) - 1).to(torch.uint8).view(groups, 8 // width, group_size * width // 8)
        plane = parts[:, 0]
        for k in range(1, 8 // width):
            plane = plane | parts[:, k] << k * width
        planes.append(plane)
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=1)


def unpack(packed: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Invert `pack`, into int32."""
    codes = None
    start = 0
    for width, offset in _planes(bits):
        stride = group_size * width // 8
        plane = packed[:, None, start : start + stride]
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)[:, None]
        part = (plane >> shifts & (1 << width) - 1).to(torch.int32).reshape(packed.shape[0], group_size) << offset
        codes = part if codes is None else codes | part
        start += stride
    assert codes is not None
    return codes


def words_to_bytes(words: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return integers (groups, n) as their ``nbytes`` low bytes each, little-endian: uint8 (groups, n * nbytes)."""
    shifts = torch.arange(0, 8 * nbytes, 8, dtype=words.dtype, device=words.device)
    return (words[:, :, None] >> shifts & 0xFF).to(torch.uint8).view(words.shape[0], words.shape[1] * nbytes)


def bytes_to_words(data: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Invert `words_to_bytes`, into int64 for words of 8 bytes and int32 for shorter ones."""
    dtype = torch.int64 if nbytes == 8 else torch.int32
    parts = data.reshape(data.shape[0], data.shape[1] // nbytes, nbytes).to(dtype)
    words = parts[:, :, 0]
    for k in range(1, nbytes):
        words = words | parts[:, :, k] << 8 * k
    return words
