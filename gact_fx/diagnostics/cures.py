"""What stays exact, why, and what to do about it; and what else a report has to warn of."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from gact_fx.diagnostics.modules import Path, blocks, label, module_of, starred
from gact_fx.diagnostics.noise import share_text
from gact_fx.diagnostics.report_rows import Row
from gact_fx.passes.encodings import Keep
from gact_fx.plan import Plan
from gact_fx.planning.budget import NOISE_LIMIT
from gact_fx.training.progress import size

# A report that saves less than so many times names the largest tensors, so many at most.
LITTLE = 2.0
MOST_BLAMED = 3
MOST_EXACT = 5
# What eager PyTorch holds between graphs is worth a warning from this share of all on.
MUCH_EAGER = 0.1
# Codes that do so many times what was predicted of each alone are worth one.
MUCH_EXCESS = 2.0

_CHECKPOINT = "torch.utils.checkpoint around the module computes it again"
# The first pattern that a reason has in it tells the remedy.
_REMEDIES = (
    ("a statistic of rows", "none needed: it is small, and all that it normalises depends on it"),
    ("fewer than", "none needed: its codes would save next to nothing"),
    ("expanded view", "none needed: it is smaller than it looks"),
    ("parameters alone|a constant", 'recompute="auto" computes it again in backward'),
    ("not known in backward", "dynamic=False compiles the model for each size"),
    ("Config.unknown_operators", 'unknown_operators="measure" tries codes of it'),
    ("adaptive=False", "adaptive=True measures it"),
    ("not measured", "profile again, by sample_batches or profile_every"),
    ("others lie in the same memory", "give the operator a clone"),
    ("Rnn(Layer)?Backward", "torch 2.13 with nn.LSTM itself, nn.GRU, nn.RNN, or a subclass with no forward of its own"),
    ("saved by eager", "remove the graph break; TORCH_LOGS=graph_breaks says where it is"),
    ("under this budget", "a smaller budget rounds it"),
    ("shares its memory", "the remedy of that tensor, or a clone"),
    ("not linear|backward compares it|more of its codes|has collectives|pole|decisions that backward", _CHECKPOINT),
    ("could not be measured", _CHECKPOINT),
    ("does not round", "none: gact_fx rounds floating-point tensors of 16 to 64 bits"),
)


@dataclass(frozen=True)
class ExactTensors:
    """Tensors of one kind that stay as they are: ``count`` of them with ``nbytes`` in all, in the ``module`` of each
    block.
    """

    module: str
    op: str
    count: int
    nbytes: int
    reason: str

    @property
    def remedy(self) -> str:
        return remedy_for(self.reason)


def remedy_for(reason: str) -> str:
    """What to do about a tensor that stays exact for ``reason``, '' where nothing is known to help."""
    return next((cure for pattern, cure in _REMEDIES if re.search(pattern, reason)), "")


def largest_exact(rows: Sequence[Row], most: int = MOST_EXACT) -> list[ExactTensors]:
    """The kinds of tensors that stay exact and take most; the same tensor of repeated blocks is one kind."""
    exact = [row for row in rows if row.encoding == Keep.label and row.bytes_after]
    stars = starred({module_of(row) for row in exact})
    kinds: dict[tuple[Path, str, str], list[Row]] = {}
    for row in exact:
        # Reasons that name other tensors differ from block to block, but their remedies do not.
        op = row.op.split("[")[0]
        kinds.setdefault((stars[module_of(row)], op, remedy_for(row.reason)), []).append(row)
    found = [_kind(path, op, several) for (path, op, _), several in kinds.items()]
    return sorted(found, key=lambda kind: -kind.nbytes)[:most]


def _kind(star: Path, op: str, rows: Sequence[Row]) -> ExactTensors:
    paths = {module_of(row) for row in rows}
    name = ".".join(star if len(paths) > 1 else next(iter(paths)))
    nbytes = sum(row.bytes_after for row in rows)
    return ExactTensors(label(name, blocks(star, paths)), op, len(rows), nbytes, rows[0].reason)


def warnings(rows: Sequence[Row], plan: Plan | None, unforeseen: Collection[int]) -> tuple[str, ...]:
    """What is not as it should be, each with the cure; ``unforeseen`` graphs are those that the plan does not know."""
    return (*_noise(plan), *_excess(plan), *_eager(rows), *_unforeseen(unforeseen), *_little(rows))


def _noise(plan: Plan | None) -> Iterator[str]:
    if plan is None or plan.variance is None or not plan.minibatch_variance:
        return
    share = plan.variance / plan.minibatch_variance
    if share > NOISE_LIMIT:
        yield (
            f"compression adds {share_text(share)} to the variance of the minibatch gradient, more than "
            f"{share_text(NOISE_LIMIT)}: raise budget_bits, or let max_gradient_noise={NOISE_LIMIT} find the budget"
        )


def _excess(plan: Plan | None) -> Iterator[str]:
    entries = [entry for graph in plan.graphs for entry in graph.tensors] if plan is not None else []
    found = [entry.excess for entry in entries if entry.code is not None and entry.excess >= MUCH_EXCESS]
    if found:
        yield (
            f"{len(found)} tensors add up to {max(found):.2g} times the noise together that each adds alone: "
            "gact_fx.measure_gradient_error tells whether the gradient bears it, and a larger budget lowers it"
        )


def _eager(rows: Sequence[Row]) -> Iterator[str]:
    eager = sum(row.bytes_after for row in rows if row.graph is None)
    if eager > MUCH_EAGER * sum(row.bytes_after for row in rows):
        yield (
            f"eager PyTorch holds {size(eager)} between graphs: remove the graph breaks that "
            "TORCH_LOGS=graph_breaks names, or have fullgraph=True make an error of the first one"
        )


def _unforeseen(graphs: Collection[int]) -> Iterator[str]:
    if graphs:
        names = ", ".join(map(str, graphs))
        yield (
            f"the plan was made without {'graph' if len(graphs) == 1 else 'graphs'} {names}, whose tensors get one "
            "width or a similar graph's: profile with sample_batches of every kind, in the mode that you train in"
        )


def _little(rows: Sequence[Row]) -> Iterator[str]:
    before, after = sum(row.bytes_before for row in rows), sum(row.bytes_after for row in rows)
    if after and before < LITTLE * after:
        largest = sorted(rows, key=lambda row: row.bytes_after, reverse=True)[:MOST_BLAMED]
        blamed = "; ".join(_blame(row) for row in largest if row.bytes_after)
        yield f"this saves less than {LITTLE:g}x; the largest: {blamed}"


def _blame(row: Row) -> str:
    stored = f"{row.bits:.3g} bits" if row.bits is not None else row.reason or row.encoding
    cure = remedy_for(row.reason) if row.bits is None else ""
    about = ", ".join(filter(None, (row.op, size(row.bytes_after), stored)))
    return f"{row.module or row.name} ({about}{f': {cure}' if cure else ''})"
