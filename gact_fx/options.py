"""Options as people write them: budgets as 8_000_000_000, ``"8GB"`` or ``"60%"``, schedules, what is not given."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[A-Za-z]+)")
_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
# A model has one.
BUDGETS = ("budget_bits", "budget_bytes", "max_gradient_noise")


class _Unset:
    """The type of `UNSET`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<default of gact_fx.Config>"


# Stands for an option that is not given; Any, so that signatures may say the types of those that are.
UNSET: Any = _Unset()


def is_schedule(budget: Any) -> bool:
    """Whether a budget of bits depends on the step of training: pairs of a step and bits, or a function."""
    return isinstance(budget, tuple) or callable(budget)


def bits_at(budget: Any, step: int) -> Any:
    """The budget of bits in a step of training, the first of which is 0."""
    if callable(budget):
        return budget(step)
    if isinstance(budget, tuple):
        return [bits for start, bits in budget if start <= step][-1]
    return budget


def parse_budget(text: str) -> int | str | None:
    """Bytes, rounded down, of a number with a unit ("8GB", "1.5 GiB"), or a share as "60%"; None for other texts."""
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        return None
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        return f"{number:g}%" if 0 < number <= 100 else None
    nbytes = int(number * _UNITS.get(unit, 0))
    return nbytes if nbytes > 0 else None


def is_share(budget: int | str | None) -> bool:
    """Whether a budget is a share, which takes a whole to be bytes."""
    return isinstance(budget, str)


def allowed_nbytes(budget: int | str, whole: int) -> int:
    """Bytes that a budget as `parse_budget` gives it allows, where 100 % are ``whole`` bytes."""
    return int(float(budget.rstrip("%")) / 100 * whole) if isinstance(budget, str) else budget


def several_budgets(stated: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong where more than one budget is asked for; ``budget_bits=None`` is none."""
    found = [name for name in BUDGETS if stated.get(name) is not None]
    if len(found) > 1:
        values = " and ".join(f"{name}={stated[name]!r}" for name in found)
        yield f"give {' or '.join(found)}, not {'both' if len(found) == 2 else 'all'}: got {values}; leave one out"
