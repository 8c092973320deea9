"""What rounding can make of a tensor's elements: the true codes next to each, and the chance of either."""

from collections.abc import Callable

import torch

from gact_fx.codec.arithmetic import dequantize, quantize
from gact_fx.codec.code import Code

GROUP_SIZE = 256
# Low, high, and the chances of both; what is left to one is the chance that nothing moves.
Neighbours = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]


def codes_beside(x: torch.Tensor, bits: int) -> Neighbours:
    """Of every element the codes below and above it, and the chances that stochastic rounding takes them."""
    groups, restore = _grouped(x)
    code = Code(bits, "stochastic", GROUP_SIZE)
    index = torch.arange(len(groups), device=x.device)
    codes, minimum, step = quantize(groups, code, index)
    drawn = dequantize(codes, minimum, step, groups.dtype, code, index)
    other = torch.where(drawn > groups, codes - 1, codes + 1).clamp(0, 2**bits - 1)
    other = dequantize(other, minimum, step, groups.dtype, code, index)
    low, high = torch.minimum(drawn, other), torch.maximum(drawn, other)
    chance = ((groups - low) / (high - low)).nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
    return restore(low), restore(high), [restore(1 - chance), restore(chance)]


def ends_of_dither(x: torch.Tensor, bits: int) -> Neighbours:
    """Half a step below and above every element, with the weights of Simpson's rule for the mean over a step."""
    groups, restore = _grouped(x)
    # Steps are rounded up to bfloat16.
    half = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (2**bits - 1) / 2 * (1 + 2**-8)
    weight = torch.full_like(x, 1 / 6)
    return restore(groups - half), restore(groups + half), [weight, weight]


ROUNDINGS: dict[str, Callable[[torch.Tensor, int], Neighbours]] = {
    "stochastic": codes_beside,
    "dither": ends_of_dither,
}


def draw(neighbours: Neighbours, rounding: str, seed: int) -> torch.Tensor:
    """One result of rounding."""
    low, high, chances = neighbours
    generator = torch.Generator(low.device).manual_seed(seed)
    noise = torch.rand(low.shape, generator=generator, device=low.device, dtype=torch.float32)
    if rounding == "dither":
        return torch.lerp(low, high, noise.to(low.dtype))
    return torch.where(noise < chances[1], high, low)


def _grouped(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Groups of elements as they lie in memory order, and what puts such groups in the shape of ``x``."""
    # Half precision has no room for the span of its own numbers.
    flat = x.detach().reshape(-1).float() if x.element_size() < 4 else x.detach().reshape(-1)
    missing = -flat.numel() % GROUP_SIZE
    groups = torch.cat([flat, flat[-1:].expand(missing)]).view(-1, GROUP_SIZE)
    return groups, lambda found: found.reshape(-1)[: flat.numel()].view(x.shape).to(x.dtype)
