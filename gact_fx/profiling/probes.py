"""The random directions along which the gradient is looked at."""

import torch

from gact_fx.plan import tensor_seed


class Signs:
    """The random v, drawn where they are needed; those of one leaf are the same wherever parts of its gradient are."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, value: torch.Tensor) -> torch.Tensor:
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        return _signs(value, self._generators[value.device])

    def of(self, leaf: int, probe: int, value: torch.Tensor) -> torch.Tensor:
        """For a gradient ``value`` of ``leaf``, or a part of it."""
        seed = tensor_seed(self._seed, f"probe {probe}", f"leaf {leaf}")
        return _signs(value, torch.Generator(value.device).manual_seed(seed))


def _signs(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    signs = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    parts = torch.view_as_real(signs) if signs.is_complex() else signs
    parts.random_(0, 2, generator=generator).mul_(2).sub_(1)
    return signs
