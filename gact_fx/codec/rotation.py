"""Rotated codes in PyTorch, on groups of elements: what ``csrc/rotation.h`` states in C++, bit by bit.

A group's deviations from its mean are turned at random, by a sign for every element and a Hadamard transform, and coded
by the nearest centroid of a normal distribution, which the turned group is close to whatever it was. The stored scale
makes the product of the decoded and the true deviations the squared norm of these, which removes the bias of centroids
(Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation", ICML 2022, section 3).
"""

from dataclasses import replace

import torch
from torch import Tensor

from gact_fx.codec.arithmetic import bits_of, dequantize, element_noise, floats_of, limit_of, noise_key, quantize
from gact_fx.codec.code import Code

# Positive centroids of a normal distribution of variance 1, by bits (Max, "Quantizing for Minimum Distortion", 1960).
_CENTROIDS = {
    1: (0.797884561,),
    2: (0.452780035, 1.51041748),
    3: (0.245094174, 0.756005252, 1.34390929, 2.15194555),
    4: (0.128394717, 0.388048291, 0.656759059, 0.942340456, 1.25623123, 1.61804641, 2.06901598, 2.73258956),
}
# Beyond these magnitudes and below these squared norms a group is coded as irregular ones are, with dither.
_LIMIT, _LEAST_SQUARED_NORM = 2.0**40, 2.0**-80
# So is one with an element whose square is more of the squared norm, by bits. What is turned then makes two heaps, and
# centroids, the more the fewer they are, would bias that element upwards and the others to nothing.
MOST_OF_NORM = {1: 0.125, 2: 0.25, 3: 0.5, 4: 0.75}


def quantize_rotated(x: Tensor, code: Code, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups of elements; arguments and results as `gact_fx.codec.arithmetic.quantize` has them, but that the
    mean takes the place of the minimum and the scale that of the step.
    """
    size = x.shape[1]
    values = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    irregular = ~(values.abs() < min(limit_of(x.dtype), _LIMIT)).all(dim=1)
    regular = torch.where(irregular[:, None], 0.0, values)
    mean_bits = bits_of((tree_sum(regular) / size + 0.0).to(x.dtype))  # -0.0 becomes +0.0
    mean = floats_of(mean_bits, x.dtype).to(values.dtype)
    turned = hadamard((regular - mean[:, None]) * _signs(code.seed, groups, mean_bits, size))
    squared_norm = tree_sum(turned.square())
    deviation = torch.maximum(regular.amax(dim=1) - mean, mean - regular.amin(dim=1))
    ill_suited = (squared_norm < _LEAST_SQUARED_NORM) | (
        deviation.square() * size > squared_norm * MOST_OF_NORM[code.bits]
    )
    irregular |= ill_suited & (squared_norm > 0)

    centroids = _centroids(code.bits, x.device)
    thresholds = ((centroids[:-1] + centroids[1:]) * 0.5).to(values.dtype)
    magnitude, root = turned.abs(), (squared_norm / size).sqrt()[:, None]
    index = torch.zeros_like(turned, dtype=torch.int32)
    for at in range(len(centroids) - 1):
        index = index + (magnitude > root * thresholds[at]).to(torch.int32)
    product = tree_sum(magnitude * centroids.to(values.dtype)[index])
    scale = torch.where(squared_norm == 0, 0.0, squared_norm / (product * size)).to(torch.float32)
    scale_bits = bits_of(scale.to(torch.bfloat16))
    codes = index | (turned < 0).to(torch.int32) << code.bits - 1

    others = quantize(x, code, groups, irregular)
    return (
        torch.where(irregular[:, None], others[0], codes),
        torch.where(irregular, others[1], mean_bits),
        torch.where(irregular, others[2], scale_bits),
    )


def dequantize_rotated(
    codes: Tensor, mean_bits: Tensor, scale_bits: Tensor, dtype: torch.dtype, code: Code, groups: Tensor
) -> Tensor:
    """Return the values (groups, group_size) of codes; arguments as `quantize_rotated` takes and returns them."""
    real = torch.float64 if dtype == torch.float64 else torch.float32
    irregular = scale_bits >= 0x8000
    half = 1 << code.bits - 1
    centroids = _centroids(code.bits, codes.device).to(real)[codes & half - 1]
    turned = hadamard(torch.where(codes >= half, -centroids, centroids))
    scale = (torch.where(irregular, 0, scale_bits) << 16).view(torch.float32).to(real)
    deviations = turned * scale[:, None] * _signs(code.seed, groups, mean_bits, codes.shape[1])
    values = floats_of(mean_bits, dtype).to(real)[:, None] + deviations
    largest = torch.finfo(dtype).max
    others = dequantize(codes, mean_bits, scale_bits, dtype, replace(code, rounding="dither"), groups)
    return torch.where(irregular[:, None], others, values.clamp(-largest, largest).to(dtype))


def hadamard(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform of every row, times the root of their length, which is a power of two."""
    size = x.shape[1]
    half = size // 2
    while half:
        first, second = x.view(-1, size // (2 * half), 2, half).unbind(2)
        x = torch.stack([first + second, first - second], 2).view(-1, size)
        half //= 2
    return x


def tree_sum(x: Tensor) -> Tensor:
    """The sum of every row, half by half: an order that vectors and threads can keep."""
    while x.shape[1] > 1:
        first, second = x.chunk(2, dim=1)
        x = first + second
    return x[:, 0]


def _signs(seed: int, groups: Tensor, mean_bits: Tensor, size: int) -> Tensor:
    """One or minus one for every element, float32: keys know no scale, which is found after the rotation."""
    key = noise_key(seed, groups, mean_bits, torch.zeros_like(mean_bits, dtype=torch.int32))
    return 1.0 - 2.0 * (element_noise(key, size, "stochastic") >> 21)


def _centroids(bits: int, device: torch.device) -> Tensor:
    # Not one tensor of constants: a graph that is traced would keep it as an attribute.
    return torch.stack([torch.full((), value, device=device, dtype=torch.float32) for value in _CENTROIDS[bits]])
