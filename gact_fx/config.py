"""Every option and every default, in one place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gact_fx.codec.layout import ROUNDINGS
from gact_fx.errors import UsageError, unknown_option
from gact_fx.options import UNSET, bits_at, is_schedule, parse_budget, several_budgets

MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
_CHOICES = {
    "rounding": ("auto", *ROUNDINGS),
    "sensitivity": ("adjoint", "empirical"),
    "recompute": ("auto", "off", "full"),
    "unknown_operators": ("measure", "exact"),
    "inner": ("inductor", "eager"),
    "fuse": ("auto", "on", "off"),
}
_SWITCHES = {
    "dynamic": (None, False, True),
    **dict.fromkeys(("adaptive", "fullgraph", "swap", "split_loss", "loss_only"), (False, True)),
}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_POSITIVE = {
    "budget_bytes": ('whole number, a text as "8GB", "500MB", "2GiB" or "60%"', _is_whole),
    "max_gradient_noise": ("number", _is_number),
    "profile_every": ("whole number of steps", _is_whole),
}
# GACT's optimisation levels: (budget_bits, adaptive, swap).
_LEVELS: dict[str, tuple[float | None, bool, bool]] = {
    "L0": (None, True, False),
    "L1": (4, False, False),
    "L1.1": (8, False, False),
    "L1.2": (2, False, False),
    "L2": (4, True, False),
    "L2.1": (3, True, False),
    "L2.2": (2, True, False),
    "L3": (4, True, True),
    "swap": (8, False, True),
}


@dataclass(frozen=True)
class Config:
    """How a model is compressed.

    Attributes:
        budget_bits: average number of bits per element over all floating saved activations that may be compressed,
            metadata included, in [1, 16]; ``None`` turns compression off. A schedule has the bits from a training step
            on, ``{0: 8, 500: 4}``, or is a function of the step. Steps are forward passes with gradients, counted from
            0. A change by less than half a bit waits for more, since every other plan is compiled.
        budget_bytes: instead, bytes of activations that may be live at a time in a step on a batch like the sample:
            what is held for backward, and what operators make and free again, as predicted. Parameters, gradients and
            the batch do not count. A whole number, or a text with a unit as ``"500MB"`` (1000 * 1000 bytes) or
            ``"2GiB"`` (1024 ** 3 bytes). ``"60%"`` is a share of this peak under ``torch.compile``: as its partitioner
            cuts the same graphs, before anything is computed again or stored in codes for gact_fx, with what eager
            PyTorch saves between the graphs; without the logits that ``split_loss`` does away with.
        max_gradient_noise: instead, the variance that compression may add to the gradient, as a share of the variance
            that the minibatch gradient has anyway (0.1: a tenth); the fewest bytes that keep to it.
        adaptive: choose each tensor's width by its sensitivity (GACT, section 4). ``False`` gives every tensor
            ``budget_bits`` bits of codes (an integer in [1, 8]), metadata and exact decisions on top.
        group_size: elements that share one minimum and step, a power of two in [32, 1024]; None chooses per tensor.
        min_elements: smaller tensors are kept as they are.
        seed: seed of the rounding noise, a 32-bit unsigned integer. Equal seeds give equal gradients on equal data.
        sensitivity: how the sensitivities of the gradient are measured: ``"adjoint"``, all tensors at once by a few
            reverse passes through backward; or ``"empirical"`` (GACT, Algorithm 1), a backward pass for each tensor.
        profile_draws: random probes per sample batch, or perturbed gradients per tensor and sample batch.
        profile_every: measure again every so many training steps (at most every second one). Another plan is made
            where widths would change and the gain is worth a compilation. None: never. Steps that are measured run at 8
            bits and operator by operator.
        recompute: ``"auto"`` computes again in backward what is cheap (pointwise operators, views, casts, indexing,
            random numbers from their seeds) instead of storing it; ``"off"`` leaves that to torch.compile's own rules;
            ``"full"`` also computes matrix products and attention again, cheapest seconds per byte first, as far as
            ``budget_bytes`` asks for, or each that needs no other one, but none that would raise the peak of a
            step.
        rounding: ``"auto"`` takes for each tensor the rounding with the least error: ``"stochastic"``; ``"dither"``,
            with half the variance on values that spread over their group's range; or, in budgets of bytes or of up to 3
            bits, ``"rotated"``, with a fifth (1 bit) to four fifths (4 bits) of dither's variance, which takes longer.
            With ``adaptive=False``, ``"auto"`` is stochastic. ``"nearest"`` is biased and serves debugging.
        swap: keep codes, masks and packed integers in pinned host memory between forward and backward. Backward fetches
            them ahead of their use. For CUDA devices, tried on small networks; on the CPU it does nothing, and a
            warning says so. Exact tensors, tensors that eager PyTorch saves between graphs, and all tensors of steps
            that are profiled stay on the device.
        unknown_operators: how to store tensors that backward passes to operators other than PyTorch's own
            (`torch.library`, Triton, other libraries). ``"measure"``: while profiling, try whether such an operator is
            linear in the gradient, and what codes of its other inputs do; tensors that fail, or were not profiled, stay
            exact. ``"exact"``: all of them stay exact.
        split_loss: compute a linear layer and the cross-entropy behind it in pieces, where the logits in between would
            have four million elements or more. Backward then computes the layer's product once more.
        loss_only: a promise that the caller reads the loss alone. Logits that ``split_loss`` splits are then never
            there whole: returned ones are NaN, without a gradient. Under ``torch.no_grad()`` they are real.
        inner: compiler of the rewritten graphs: ``"inductor"``, or ``"eager"``, which needs no C++ compiler at run
            time.
        fuse: spell compression and decompression out for Inductor to fuse with their neighbours (``"on"``), or call the
            compiled operators (``"off"``). ``"auto"`` fuses only on devices that have no compiled operators. On the CPU
            the compiled operators are several times faster; on a GPU nobody has measured it yet.
        dynamic: as in ``torch.compile``: sizes that vary (True), sizes as they come, with a compilation for each
            (False), or sizes that turn out to vary (None).
        fullgraph: as in ``torch.compile``: a graph break is an error.
        mode: as in ``torch.compile``, Inductor's presets: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or
            ``"max-autotune-no-cudagraphs"``.
        inductor_options: as ``options`` of ``torch.compile``: fields of ``torch._inductor.config``, laid over ``mode``.

    Raises:
        ValueError: an option out of its range.
    """

    # Sessions have a number there, or None.
    budget_bits: float | Any | None = 4.0
    adaptive: bool = True
    budget_bytes: int | str | None = None
    max_gradient_noise: float | None = None
    group_size: int | None = None
    min_elements: int = 1024
    seed: int = 0
    sensitivity: str = "adjoint"
    profile_draws: int = 2
    profile_every: int | None = None
    rounding: str = "auto"
    inner: str = "inductor"
    fuse: str = "auto"
    recompute: str = "auto"
    swap: bool = False
    unknown_operators: str = "measure"
    split_loss: bool = True
    loss_only: bool = False
    dynamic: bool | None = None
    fullgraph: bool = False
    mode: str | None = None
    inductor_options: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.budget_bytes, str):
            # A text that is no budget stays, and is refused below.
            object.__setattr__(self, "budget_bytes", parse_budget(self.budget_bytes) or self.budget_bytes)
        if isinstance(self.budget_bits, Mapping):
            # Configurations are compared and hashed.
            object.__setattr__(self, "budget_bits", tuple(sorted(self.budget_bits.items())))
        problem = next(self._problems(), None)
        if problem is not None:
            raise UsageError(f"gact_fx.compile: {problem}")

    def _problems(self) -> Iterator[str]:
        """What is wrong with the options, in an order in which each check may count on those before it."""
        budget = self.budget_bits
        if isinstance(budget, tuple) and not (budget and all(_is_whole(s) for s, _ in budget) and budget[0][0] == 0):
            yield f"a schedule of budget_bits must have bits from step 0 on, as {{0: 8, 9: 4}}, got {dict(budget)!r}"
        for bits in [b for _, b in budget] if isinstance(budget, tuple) else [bits_at(budget, 0)]:
            yield from self.problems_of_bits(bits)
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            yield f"group_size must be None or one of {GROUP_SIZES}, got {self.group_size!r}"
        yield from self._problems_of_other_budgets()
        yield from self._problems_of_compilation()
        if self.loss_only and not self.split_loss:
            yield "loss_only=True needs split_loss=True, got False; leave one out"
        if self.swap and budget is None:
            yield "swap=True moves codes, and budget_bits=None makes none; leave one out"
        if self.swap and self.inductor_patches.get("triton.cudagraphs"):
            yield (
                "swap=True waits for copies outside of the graph, which CUDA graphs cannot, got "
                f"mode={self.mode!r}; use mode='max-autotune-no-cudagraphs', or leave one out"
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                yield f"{name} must be one of {allowed}, got {getattr(self, name)!r}"
        if self.fuse == "on" and self.inner != "inductor":
            yield f"fuse='on' needs inner='inductor', which does the fusing, got inner={self.inner!r}"
        for name, low, high in (("min_elements", 0, 2**62), ("profile_draws", 1, 2**20), ("seed", 0, 2**32 - 1)):
            value = getattr(self, name)
            if not _is_whole(value) or not low <= value <= high:
                yield f"{name} must be a whole number in [{low}, {high}], got {value!r}"

    def problems_of_bits(self, bits: Any) -> Iterator[str]:
        """What is wrong with a number of bits, or None for no compression, beside the other options."""
        if bits is not None and not (_is_number(bits) and 1 <= bits <= 16):
            yield f"budget_bits must lie in [1, 16], or be None for no compression, got {bits!r}"
        elif bits is None and is_schedule(self.budget_bits):
            yield "a schedule of budget_bits must say how many, got None"
        elif bits is not None and not self.adaptive and (bits != int(bits) or bits > 8):
            yield f"adaptive=False takes a whole number of bits in [1, 8], got budget_bits={bits!r}"

    def _problems_of_other_budgets(self) -> Iterator[str]:
        for name, (kind, is_one) in _POSITIVE.items():
            value = getattr(self, name)
            is_percentage = name == "budget_bytes" and isinstance(value, str) and parse_budget(value) == value
            if value is not None and not is_percentage and not (is_one(value) and 0 < value < float("inf")):
                yield f"{name} must be a positive {kind}, or None, got {value!r}"
        yield from several_budgets(self.stated())
        given = [name for name in ("budget_bytes", "max_gradient_noise") if getattr(self, name) is not None]
        if given and (self.budget_bits is None or not self.adaptive):
            reason = "budget_bits=None, which turns compression off" if self.budget_bits is None else "adaptive=False"
            yield f"{given[0]} cannot be kept with {reason}; leave one of them out"

    def _problems_of_compilation(self) -> Iterator[str]:
        for name, allowed in _SWITCHES.items():
            if not any(getattr(self, name) is value for value in allowed):
                yield f"{name} must be one of {allowed}, got {getattr(self, name)!r}"
        for name in ("mode", "inductor_options"):
            if getattr(self, name) is not None and self.inner != "inductor":
                yield f"{name} is for inner='inductor', got inner={self.inner!r}"
        if self.mode is not None and self.mode not in MODES:
            yield f"mode must be None or one of {MODES}, got {self.mode!r}"
        if self.inductor_options is not None:
            # Slow to import, and seldom needed.
            from gact_fx.graphs.compilers import inductor_options

            if not isinstance(self.inductor_options, Mapping):
                yield f"inductor_options must map options to values, got {self.inductor_options!r}"
            # The partitioner is ours.
            known = inductor_options() - {"custom_partitioner_fn"}
            for name in self.inductor_options:
                if name not in known:
                    yield (
                        f"unknown option {name!r} in inductor_options; torch._inductor.list_options() has those that "
                        "exist"
                    )

    @property
    def eager_bits(self) -> int:
        """Width of what is saved in eager PyTorch, where no sensitivity is measured."""
        if self.max_gradient_noise is not None or self.budget_bits is None:
            return 8
        return min(int(bits_at(self.budget_bits, 0)), 8)

    @property
    def inductor_patches(self) -> dict[str, Any]:
        """What ``mode`` and ``inductor_options`` change in Inductor's configuration."""
        if self.mode is None:
            return dict(self.inductor_options or {})
        from gact_fx.graphs.compilers import inductor_mode

        return {**inductor_mode(self.mode), **(self.inductor_options or {})}

    @classmethod
    def from_level(cls, level: str, **overrides: Any) -> "Config":
        """The configuration behind one of GACT's level names (its ``set_optimization_level``).

        L0 none; L1, L1.1, L1.2 fixed 4, 8, 2 bits; L2, L2.1, L2.2 adaptive 4, 3, 2 bits; L3 is L2 with ``swap``. GACT's
        "swap" moves activations as they are; here only codes are moved, and it has the widest: 8 bits for every tensor.

        Raises:
            ValueError: a level that is unknown.
        """
        return cls.from_options({**_options_of_level(level), **overrides})

    @classmethod
    def from_options(cls, options: Mapping[str, Any], base: "Config | str | None" = None) -> "Config":
        """``base`` (default: all defaults; a text is one of GACT's levels) with ``options`` laid over it.

        Raises:
            ValueError: an option that does not exist or is out of its range; one that differs from what ``base`` sets
                to other than its default, or what its level stands for; two budgets.
        """
        for name in options:
            if name not in OPTIONS:
                raise unknown_option("gact_fx.compile", name, OPTIONS)
        source = repr(base) if isinstance(base, str) else "Config"
        stated = _options_of_level(base) if isinstance(base, str) else base.stated() if base is not None else {}
        for problem in several_budgets({**stated, **options}):
            raise UsageError(f"gact_fx.compile: {problem}")
        found = replace(base if isinstance(base, Config) else cls(**stated), **options)
        for name in options:
            value = getattr(found, name)
            if name in stated and stated[name] != value:
                raise UsageError(
                    f"gact_fx.compile: {name}={value!r} is given beside config={source}, which says "
                    f"{name}={stated[name]!r}; leave one of them out"
                )
        return found

    def stated(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        values = {option.name: (getattr(self, option.name), option.default) for option in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


# The names of all options, in their order.
OPTIONS: tuple[str, ...] = tuple(option.name for option in fields(Config))


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the ``arguments`` that are options and not `UNSET`."""
    return {name: arguments[name] for name in OPTIONS if arguments[name] is not UNSET}


def _options_of_level(level: str) -> dict[str, Any]:
    if level not in _LEVELS:
        raise UsageError(f"gact_fx.Config: level must be one of {tuple(_LEVELS)}, got {level!r}")
    return dict(zip(("budget_bits", "adaptive", "swap"), _LEVELS[level], strict=True))
