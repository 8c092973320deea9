"""What would other ways to store a tensor be worth? Variance of the gradient against bytes, for every way.

    python benchmarks/rate.py [NETWORK ...] [--bits 4 2] [--probes 4] [--train STEPS] [--tensors]

Networks are those of ``networks.py``; "minilm", pretrained and fine-tuned for a few steps on speeches that are padded
(``speakers.py``), and "minilm-filled", on speeches that fill their length. Of two batches the adjoints of the gradient
at every stored tensor are taken, as profiling does, on a few rows where it takes a few. The variance that a code adds
is the sum, over the elements, of the squared adjoint times the variance of the error (subtractive dither in groups of
256: a twelfth of the squared step). For every way each tensor has a menu of bytes and variance, and the bytes are
shared out for the least variance in all.

- ``plain``: one width a tensor, as gact_fx stores.
- ``range``: two widths, a group's chosen by its range, which decoding can tell; a group without range costs 0 bits.
- ``rotated``: the better of plain and of codes of the group's Hadamard transform with random signs.
- ``centroids``: the better of plain and of rotated groups in the centroids of a normal distribution, as gact_fx has
  them, but for its rule for elements that stick out. ``channel+centroids`` has both.
- ``channel``: the better of plain and of codes of groups within channels, of 256 elements, or of as many as a channel
  of the sample has.
- ``place``: two widths by the place of a group in its row of the batch, chosen on the other batch.
- ``place+rotated``: the better of both for each tensor.
- ``oracle``: two widths, every group's chosen knowing this batch's adjoints: nothing that a code could know.

The gain is in bits at equal bytes: one bit is a quarter of the variance.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from machine import describe, save
from networks import Batch, build
from real_data import tinyshakespeare
from sensitivity import recorded
from torch import Tensor, nn

from gact_fx.config import Config
from gact_fx.profiling import adjoint
from gact_fx.profiling.channel_ranges import ChannelRanges
from gact_fx.profiling.measure_step import measure_step
from gact_fx.profiling.rounding_meter import RoundingMeter
from gact_fx.profiling.tape import Step

GROUP = 256
# Bits of a group's metadata, an element.
METADATA = 32 / GROUP
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)
SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 15 / 16)
WAYS = ("plain", "range", "rotated", "centroids", "channel", "channel+centroids", "place", "place+rotated", "oracle")
Network = tuple[nn.Module, list[Batch], Callable[[nn.Module, Batch], Tensor]]
# Bytes and variance.
Choice = tuple[float, float]


@dataclass(frozen=True)
class Groups:
    """One tensor in groups, a row of each: ``step2`` is the squared step of one bit, ``weight`` the sum of the squared
    adjoints, ``energy`` the variance of a code of 0 bits, the mean of the group. ``rotated2`` is the step of the
    rotated group. ``rows`` is how many rows of the batch the groups are of. ``within`` has squared steps and weights of
    groups within channels, None where there are no channels.
    """

    step2: Tensor
    rotated2: Tensor
    weight: Tensor
    energy: Tensor
    rows: int
    centroids: dict[int, Tensor]
    within: tuple[Tensor, Tensor] | None = None

    def variances(self, bits: int, rotated: bool = False) -> Tensor:
        """Of every group, in codes of ``bits``."""
        if bits == 0:
            return self.energy
        return (self.rotated2 if rotated else self.step2) * self.weight / (12 * float(2**bits - 1) ** 2)


class Keeping(RoundingMeter):
    """A meter that keeps what it is given."""

    def __init__(self, values: Tensor, *args: Any) -> None:
        super().__init__(values, *args)
        self.channels = values.shape[-1] if ChannelRanges.reads(values) else 0
        self.values, self.squares, self.probes = values.detach().reshape(-1).float(), torch.zeros(values.numel()), 0

    def add(self, sensitivity: Tensor, *args: Any) -> None:
        super().add(sensitivity, *args)
        self.squares += sensitivity.detach().reshape(-1).float().square()
        self.probes += 1


def network(name: str, steps: int) -> Network:
    """The model, two batches and the loss; a MiniLM after ``steps`` of training."""
    if not name.startswith("minilm"):
        model, batch, loss_fn = build(name)
        return model, [batch, _another(batch)], loss_fn
    import speakers

    some, _ = speakers.speeches(tinyshakespeare())
    model = speakers.build()
    data = speakers.filled(some, 64) if name == "minilm-filled" else speakers.tokenize(some[:: len(some) // 1000])
    order = torch.randperm(len(data["labels"]), generator=torch.Generator().manual_seed(0)).split(speakers.ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    for at in range(steps):
        optimizer.zero_grad()
        speakers.loss_fn(model, speakers.rows_of(data, order[at % (len(order) - 2)])).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, [speakers.rows_of(data, rows) for rows in order[-3:-1]], speakers.loss_fn


def _another(batch: Batch) -> Batch:
    """A batch of the same kind: the elements of every row, in another order. A graph is the same one in every step."""
    if "edge_index" in batch:
        return batch
    return {key: x.flip(0).roll(7, -1) if x.dim() > 1 else x.flip(0) for key, x in batch.items()}


def groups_of(steps: Sequence[Step], rows: int, probes: int) -> dict[str, Groups]:
    """By tensor, its groups, of those that are stored in codes of their values."""
    found: dict[str, Groups] = {}
    original = adjoint.__dict__["RoundingMeter"]
    setattr(adjoint, "RoundingMeter", Keeping)  # noqa: B010
    meters: list[dict[str, Any]] = []
    finish = adjoint.Adjoint.run

    def run(self: Any) -> Any:
        result = finish(self)
        meters.append(self.meters)
        return result

    adjoint.Adjoint.run = run  # type: ignore[method-assign]
    try:
        measure_step(steps, Config(profile_draws=probes))
    finally:
        setattr(adjoint, "RoundingMeter", original)  # noqa: B010
        adjoint.Adjoint.run = finish  # type: ignore[method-assign]
    for at, by_name in enumerate(meters):
        for name, meter in by_name.items():
            if meter.probes and bool(torch.isfinite(meter.squares).all()):
                found[f"{at}.{name}"] = _groups(meter.values, meter.squares / meter.probes, rows, meter.channels)
    return found


def _groups(values: Tensor, squares: Tensor, rows: int, channels: int = 0) -> Groups:
    # A row of the batch has whole groups, so that places mean the same in all of them.
    if values.numel() % rows or values.numel() // rows < GROUP:
        rows = 1
    pad = -(values.numel() // rows) % GROUP
    x = torch.nn.functional.pad(values.view(rows, -1), (0, pad), mode="replicate").view(-1, GROUP)
    weight = torch.nn.functional.pad(squares.view(rows, -1), (0, pad)).view(-1, GROUP)
    signs = torch.randint(0, 2, (GROUP,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    turned = hadamard(x * signs)
    spread = (x - x.mean(1, keepdim=True)).square()
    return Groups(
        (x.amax(1) - x.amin(1)).square(),
        (turned.amax(1) - turned.amin(1)).square(),
        weight.sum(1),
        (spread * weight).sum(1),
        rows,
        _centroids(hadamard((x - x.mean(1, keepdim=True)) * signs)),
        _within_channels(values, squares, channels) if channels else None,
    )


def _within_channels(values: Tensor, squares: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Squared steps and weights of groups within channels; what fills no group counts as the others do."""
    length = values.numel() // channels
    size = min(GROUP, length)
    whole = length // size * size
    x, weight = (each.view(length, channels).t()[:, :whole].reshape(-1, size) for each in (values, squares))
    return (x.amax(1) - x.amin(1)).square(), weight.sum(1) * (length / whole)


def _centroids(turned: Tensor) -> dict[int, Tensor]:
    """By bits, the mean squared error of every group in the centroids of a normal distribution (Lloyd-Max), scaled so
    that the code's product with the group is the group's squared norm: EDEN (Vargaftik et al., ICML 2022), section 3.
    """
    norm2 = turned.square().mean(1)
    scaled = turned / norm2.sqrt().clamp(min=1e-30)[:, None]
    found = {}
    for bits in (1, 2, 3, 4):
        levels = _lloyd_max(bits)
        code = levels[torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2)]
        scale = scaled.square().mean(1) / (scaled * code).mean(1).clamp(min=1e-30)
        found[bits] = norm2 * ((scale[:, None] * code - scaled).square().mean(1))
    return found


@functools.cache
def _lloyd_max(bits: int) -> Tensor:
    """The levels of least squared error for a normal distribution, in ascending order."""
    x = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
    density = (-x.square() / 2).exp()
    levels = torch.linspace(-2, 2, 2**bits, dtype=torch.float64)
    for _ in range(500):
        nearest = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros_like(levels).index_add(0, nearest, density)
        levels = torch.zeros_like(levels).index_add(0, nearest, density * x) / mass
    return levels.float()


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of every row; their length is a power of two."""
    size = x.shape[1]
    half = 1
    while half < size:
        parts = x.view(-1, size // (2 * half), 2, half)
        x = torch.stack([parts[:, :, 0] + parts[:, :, 1], parts[:, :, 0] - parts[:, :, 1]], 2).view(-1, size)
        half *= 2
    return x / math.sqrt(size)


def menu(way: str, here: Groups, other: Groups) -> list[Choice]:
    """Bytes and variance of every way to store the groups ``here``; patterns are chosen on the ``other`` batch."""
    count = len(here.weight)
    plain = [(_nbytes(count * bits, count), float(here.variances(bits).sum())) for bits in WIDTHS[1:]]
    turned = [
        (nbytes, float(here.variances(bits, True).sum())) for (nbytes, _), bits in zip(plain, WIDTHS[1:], strict=True)
    ]
    if way == "plain":
        return plain
    if way == "rotated":
        return plain + turned
    centroids = [
        (_nbytes(count * bits, count), float((errors * here.weight).sum())) for bits, errors in here.centroids.items()
    ]
    if way == "centroids":
        return plain + centroids
    if way == "channel":
        return plain + _within(here, count * GROUP)
    if way == "channel+centroids":
        return plain + _within(here, count * GROUP) + centroids
    if way == "range":
        return plain + _two_widths(here, here.step2.sqrt(), here.step2 == 0)
    if way == "oracle":
        return plain + _two_widths(here, here.step2 * here.weight, here.step2 == 0)
    if other.rows != here.rows or len(other.weight) != count:
        return plain + (turned if way != "place" else [])
    merit = (other.step2 * other.weight).view(other.rows, -1).mean(0).repeat(here.rows)
    void = (other.step2.view(other.rows, -1).amax(0) == 0).repeat(here.rows)
    found = plain + _two_widths(here, merit, void)
    return found + (turned + _two_widths(here, merit, void, rotated=True) if way == "place+rotated" else [])


def _within(groups: Groups, numel: int) -> list[Choice]:
    """Codes of groups within channels, of ``numel`` elements."""
    if groups.within is None:
        return []
    step2, weight = groups.within
    metadata = METADATA * GROUP * len(step2) / 8
    return [
        (bits * numel / 8 + metadata, float((step2 * weight).sum()) / (12 * float(2**bits - 1) ** 2))
        for bits in WIDTHS[1:]
    ]


def _two_widths(groups: Groups, merit: Tensor, void: Tensor, rotated: bool = False) -> list[Choice]:
    """Choices that give the groups of most ``merit`` a larger width, and ``void`` ones none.

    What has a range gets a bit at least: of none the error would be a bias.
    """
    order = merit.masked_fill(void, -1).argsort(descending=True)
    live, count = int((~void).sum()), len(merit)
    by_width = {bits: groups.variances(bits, rotated)[order].double().cumsum(0) for bits in WIDTHS}
    found = []
    for share in (*SHARES, 1.0):
        first = round(share * live)
        for high in WIDTHS[1:]:
            for low in [bits for bits in WIDTHS[1:] if bits < high] or [high]:
                variance = (
                    _sum(by_width[high], 0, first) + _sum(by_width[low], first, live) + _sum(by_width[0], live, count)
                )
                found.append((_nbytes(first * high + (live - first) * low, count), variance))
    return found


def _sum(cumulated: Tensor, start: int, end: int) -> float:
    if end <= start:
        return 0.0
    return float(cumulated[end - 1] - (cumulated[start - 1] if start else 0))


def _nbytes(widths: float, count: int) -> float:
    """Of ``count`` groups, whose widths sum to ``widths``."""
    return (widths + METADATA * count) * GROUP / 8


def least_variance(menus: Sequence[Sequence[Choice]], nbytes: float) -> float:
    """The least variance within ``nbytes``, on the lower convex hull of every menu (Lagrangian relaxation)."""
    low, high = 0.0, 1e300
    best = math.inf
    for _ in range(200):
        price = math.sqrt(max(low, 1e-300) * high) if low else high * 1e-30
        chosen = [min(choices, key=lambda choice: choice[1] + price * choice[0]) for choices in menus]
        if sum(choice[0] for choice in chosen) <= nbytes:
            best, high = min(best, sum(choice[1] for choice in chosen)), price
        else:
            low = price
        if low and high / low < 1 + 1e-9:
            break
    return best


def measure(name: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By bits, what every way gains."""
    model, batches, loss_fn = network(name, options.train)
    both = []
    for batch in batches:
        steps = recorded(copy.deepcopy(model), batch, loss_fn)
        # The variance of a few rows is that share of the whole batch's, or so many times it.
        share = min(steps[0].weight, 1 / steps[0].weight)
        both.append(groups_of(steps, round(share * min(len(x) for x in batch.values())), options.probes))
    names = both[0].keys() & both[1].keys()
    menus = {way: {key: menu(way, both[0][key], both[1][key]) for key in names} for way in WAYS}
    elements = sum(len(both[0][key].weight) for key in names) * GROUP
    found = {}
    for bits in options.bits:
        nbytes = (bits + METADATA) * elements / 8
        least = {way: least_variance(list(menus[way].values()), nbytes) for way in WAYS}
        found[f"{bits:g}"] = {way: 0.5 * math.log2(least["plain"] / least[way]) for way in WAYS}
        if options.tensors:
            for key in sorted(names):
                alone = {
                    way: least_variance([menus[way][key]], nbytes * len(both[0][key].weight) * GROUP / elements)
                    for way in WAYS
                }
                gains = " ".join(f"{0.5 * math.log2(alone['plain'] / alone[way]):8.2f}" for way in WAYS[1:])
                print(f"  {key:40} {len(both[0][key].weight) * GROUP:9} {gains}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "networks", nargs="*", default=["minilm", "minilm-filled", "bert", "gpt2", "llama", "swin", "gcn"]
    )
    parser.add_argument("--bits", type=float, nargs="+", default=[4, 2])
    parser.add_argument("--probes", type=int, default=4, help="random vectors for the adjoint passes")
    parser.add_argument("--train", type=int, default=20, help="steps that a MiniLM is fine-tuned before")
    parser.add_argument("--tensors", action="store_true", help="print every tensor, too")
    options = parser.parse_args()
    print(f"gain in bits at equal bytes, against one width a tensor; {describe()}")
    print(f"{'network':14} {'bits':>4} " + " ".join(f"{way:>14}" for way in WAYS[1:]))
    results = {}
    for name in options.networks:
        results[name] = measure(name, options)
        for bits, gains in results[name].items():
            print(f"{name:14} {bits:>4} " + " ".join(f"{gains[way]:14.2f}" for way in WAYS[1:]), flush=True)
        save("rate", results)


if __name__ == "__main__":
    main()
