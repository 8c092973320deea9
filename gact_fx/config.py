"""Every option and every default, in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from gact_fx.codec_layout import ROUNDINGS

INNER_COMPILERS = ("inductor", "eager")
FUSE = ("auto", "on", "off")
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)

# GACT's optimisation levels: (budget_bits, adaptive).
_LEVELS: dict[str, tuple[float | None, bool]] = {
    "L0": (None, True),
    "L1": (4, False),
    "L1.1": (8, False),
    "L1.2": (2, False),
    "L2": (4, True),
    "L2.1": (3, True),
    "L2.2": (2, True),
}
_SWAP_LEVELS = ("L3", "swap")


@dataclass(frozen=True)
class Config:
    """How a model is compressed.

    Attributes:
        budget_bits: average number of bits per element over all floating saved activations that may be compressed,
            metadata included, in [1, 16]; ``None`` turns compression off.
        adaptive: choose each tensor's width by its sensitivity (GACT, section 4). ``False`` gives every tensor
            ``budget_bits`` bits of codes (an integer in [1, 8]), metadata on top.
        group_size: elements that share one minimum and step, a power of two in [32, 1024].
        min_elements: smaller tensors are kept as they are.
        seed: seed of the rounding noise, a 32-bit unsigned integer. Equal seeds give equal gradients on equal data.
        profile_draws: perturbed gradients per tensor and sample batch when sensitivities are measured.
        rounding: ``"stochastic"``; ``"dither"`` (subtractive dither), which has half the error variance on values
            that spread over their group's range and more on those that lie at its minimum, as after a ReLU; or
            ``"nearest"``, which is biased and serves debugging. `gact_fx.ops.compress` says more.
        inner: compiler of the rewritten graphs: ``"inductor"``, or ``"eager"``, which needs no C++ compiler at run
            time.
        fuse: spell compression and decompression out for Inductor to fuse with their neighbours (``"on"``), or call the
            compiled operators (``"off"``). ``"auto"`` fuses only on devices that have no compiled operators: on the CPU
            these are several times faster (``benchmarks/kernels.py``); on a GPU nobody has measured it yet.

    Raises:
        ValueError: an option out of its range.
    """

    budget_bits: float | None = 4.0
    adaptive: bool = True
    group_size: int = 256
    min_elements: int = 1024
    seed: int = 0
    profile_draws: int = 1
    rounding: str = "stochastic"
    inner: str = "inductor"
    fuse: str = "auto"

    def __post_init__(self) -> None:
        bits = self.budget_bits
        if bits is not None and not (_is_number(bits) and 1 <= bits <= 16):
            raise ValueError(
                f"gact_fx.compile: budget_bits must lie in [1, 16], or be None for no compression, got {bits!r}"
            )
        if bits is not None and not self.adaptive and (bits != int(bits) or bits > 8):
            raise ValueError(
                f"gact_fx.compile: adaptive=False takes a whole number of bits in [1, 8], got budget_bits={bits!r}"
            )
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"gact_fx.compile: group_size must be one of {GROUP_SIZES}, got {self.group_size!r}")
        for name, allowed in (("rounding", ROUNDINGS), ("inner", INNER_COMPILERS), ("fuse", FUSE)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"gact_fx.compile: {name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.fuse == "on" and self.inner != "inductor":
            raise ValueError(
                f"gact_fx.compile: fuse='on' needs inner='inductor', which does the fusing, got inner={self.inner!r}"
            )
        for name, low, high in (("min_elements", 0, 2**62), ("profile_draws", 1, 2**20), ("seed", 0, 2**32 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"gact_fx.compile: {name} must be a whole number in [{low}, {high}], got {value!r}")

    @classmethod
    def from_level(cls, level: str, **overrides: Any) -> Config:
        """The configuration behind one of GACT's level names (its ``set_optimization_level``).

        L0 none; L1, L1.1, L1.2 fixed 4, 8, 2 bits; L2, L2.1, L2.2 adaptive 4, 3, 2 bits. L3 and swap move activations
        to host memory, which this version does not do.

        Raises:
            ValueError: a level that is unknown or needs swapping.
        """
        if level in _SWAP_LEVELS:
            raise ValueError(
                f"gact_fx.Config: level {level!r} swaps to host memory, which this version does not do; "
                "use 'L2', the same compression without the swap"
            )
        if level not in _LEVELS:
            raise ValueError(f"gact_fx.Config: level must be one of {tuple(_LEVELS)}, got {level!r}")
        budget_bits, adaptive = _LEVELS[level]
        return cls.from_options({"budget_bits": budget_bits, "adaptive": adaptive, **overrides})

    @classmethod
    def from_options(cls, options: dict[str, Any], base: Config | None = None) -> Config:
        """``base`` (default: all defaults) with ``options`` laid over it.

        Raises:
            ValueError: an option that does not exist or is out of its range.
        """
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise ValueError(
                    f"gact_fx.compile: unknown option {name!r}; the options are {', '.join(sorted(known))}"
                )
        start = base if base is not None else cls()
        return cls(**{**{name: getattr(start, name) for name in known}, **options})


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
