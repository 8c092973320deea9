"""What rounding can make of a tensor's elements: the codes next to each, and the chance of either.

Blobs have steps rounded up to bfloat16, so a group's largest element lies a little below the last code; how little is
chance. Taken as it is, a group whose largest element counts for most would seem free of error where that is a code by
luck. So steps are rounded up by the part by which those of all groups are in the mean.
"""

from collections.abc import Callable

import torch

GROUP_SIZE = 256
# Mantissa of a stored step, the leading bit included.
STEP_BITS = 8
# Low, high, and the chances of both; what is left to one is the chance that nothing moves.
Neighbours = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]


def codes_beside(x: torch.Tensor, bits: int) -> Neighbours:
    """Of every element the codes below and above it, and the chances that stochastic rounding takes them."""
    groups, restore = _grouped(x)
    minimum, step = _grid(groups, bits)
    below = ((groups - minimum) / step).floor().nan_to_num(0.0, 0.0, 0.0)
    # What is not finite stays as it is.
    low = torch.where(groups.isfinite(), minimum + below * step, groups)
    chance = ((groups - low) / step).nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
    return restore(low), restore(low + step), [restore(1 - chance), restore(chance)]


def ends_of_dither(x: torch.Tensor, bits: int) -> Neighbours:
    """Half a step below and above every element, with the weights of Simpson's rule for the mean over a step."""
    groups, restore = _grouped(x)
    _, step = _grid(groups, bits)
    weight = torch.full_like(x, 1 / 6)
    return restore(groups - step / 2), restore(groups + step / 2), [weight, weight]


ROUNDINGS: dict[str, Callable[[torch.Tensor, int], Neighbours]] = {
    "stochastic": codes_beside,
    "dither": ends_of_dither,
}


def farthest(x: torch.Tensor, bits: int, rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most that codes can make of every element, however steps are rounded up."""
    groups, restore = _grouped(x)
    minimum, step = _grid(groups, bits)
    step = step * (1 + 2 ** (1 - STEP_BITS))
    low, high = groups - step / 2, groups + step / 2
    if rounding == "stochastic":
        low = (groups - step).maximum(minimum)
        high = (groups + step).minimum(minimum + (2**bits - 1) * step)
    finite = groups.isfinite()
    return restore(torch.where(finite, low, groups)), restore(torch.where(finite, high, groups))


def rounded_up(steps: torch.Tensor, bits: int = STEP_BITS) -> torch.Tensor:
    """``steps`` (..., groups, 1) as blobs have them in the mean over groups, with so many bits of mantissa."""
    mantissa, exponent = torch.frexp(steps)
    stored = torch.ldexp((mantissa * 2**bits).ceil(), exponent - bits)
    return steps * (stored.sum(-2, keepdim=True) / steps.sum(-2, keepdim=True)).nan_to_num(1.0)


def draw(neighbours: Neighbours, rounding: str, seed: int) -> torch.Tensor:
    """One result of rounding."""
    low, high, chances = neighbours
    generator = torch.Generator(low.device).manual_seed(seed)
    noise = torch.rand(low.shape, generator=generator, device=low.device, dtype=torch.float32)
    if rounding == "dither":
        return torch.lerp(low, high, noise.to(low.dtype))
    return torch.where(noise < chances[1], high, low)


def _grid(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The minimum of every group's finite elements, and its step."""
    finite = groups.isfinite()
    low = torch.where(finite, groups, torch.inf).amin(1, keepdim=True)
    high = torch.where(finite, groups, -torch.inf).amax(1, keepdim=True)
    return low, rounded_up((high - low).clamp(min=0) / (2**bits - 1))


def _grouped(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Groups of elements as they lie in memory order, and what puts such groups in the shape of ``x``."""
    # Half precision has no room for the span of its own numbers.
    flat = x.detach().reshape(-1).float() if x.element_size() < 4 else x.detach().reshape(-1)
    missing = -flat.numel() % GROUP_SIZE
    groups = torch.cat([flat, flat[-1:].expand(missing)]).view(-1, GROUP_SIZE)
    return groups, lambda found: found.reshape(-1)[: flat.numel()].view(x.shape).to(x.dtype)
