"""What Inductor makes loops of, and which of their results are never in memory.

Loops between the same two calls of a library may be one kernel, which hands results on in registers. And what is cheap
is computed anew by every kernel that reads it. The rules for that are those of ``torch._inductor.ir.StorageBox`` in
torch 2.11 to 2.13.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.edit import elements_nbytes
from gact_fx.graphs.operator_table import CONSTANTS, LIBRARY, REDUCTIONS
from gact_fx.graphs.operators import MAKES_MEMORY, packet_of

aten = torch.ops.aten
LOOPS = ("aten", "prims")
# Of what several loops read Inductor keeps the result where one of these is inside of it (on a CPU; by `realizing_less`
# more kinds than one, or one where it is small or reads more than so many times what it makes), or where it reads more
# tensors, or is made of more operators. What one loop reads may read more.
HEAVY = frozenset({aten.exp, aten.sigmoid})
if torch.torch_version.TorchVersion(torch.__version__) >= "2.13":
    HEAVY |= {aten.log, aten.log10, aten.log1p, aten.log2, aten.tanh}
MOST_HEAVY, MOST_READ, LEAST_NBYTES = 1, 1.5, 2**18
MOST_READS, MOST_READS_OF_ONE, MOST_OPERATORS = 4, 8, 30
Readers = Mapping[fx.Node, set[fx.Node]]


def is_of_library(node: fx.Node) -> bool:
    """Whether Inductor generates no loops for what ``node`` calls: a library has it, or it is not PyTorch's own."""
    packet = packet_of(node)
    if packet is None:
        return getattr(node.target, MAKES_MEMORY, False)
    return packet in LIBRARY or is_foreign(node)


def is_foreign(node: fx.Node) -> bool:
    """Whether a call returns memory that it made itself, which Inductor does not write over."""
    packet = packet_of(node)
    return packet is None or _namespace(packet) not in LOOPS


@functools.cache
def _namespace(packet: Any) -> str:
    return str(packet).partition(".")[0]


def find_ranks(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many calls of a library lie before a node: loops between the same two of these may be one kernel."""
    rank: dict[fx.Node, int] = {}
    for node in graph.nodes:
        rank[node] = max((rank[source] + is_of_library(source) for source in node.all_input_nodes), default=0)
    return rank


def find_inlined(nodes: Sequence[fx.Node], views: Collection[fx.Node], rank: Mapping[fx.Node, int]) -> set[fx.Node]:
    """The calls whose results are never in memory: their readers compute them, or run in the same kernel.

    ``views`` are those of the calls ``nodes`` that give memory that was there before.
    """
    readers = _find_readers(nodes, views)
    own = [node for node in nodes if node not in views and not is_of_library(node)]
    loops = {node for node in own if all(map(_is_loop, readers[node]))}
    found = _find_repeated(nodes, views, loops, readers)
    # By call, the ranks of those with results of their own that read it, themselves or what is computed again for
    # them; two stand for all.
    ranks: dict[fx.Node, set[int]] = {}
    for node in reversed(nodes):
        through = [ranks[reader] if reader in found else {rank[reader]} for reader in readers[node]]
        ranks[node] = set(itertools.islice(set().union(*through), 2))
        if node in loops and ranks[node] <= {rank[node]}:
            found.add(node)
    return found


def _find_readers(nodes: Sequence[fx.Node], views: Collection[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """By call, those that read its result or a view of it."""
    readers: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(nodes):
        through = [readers[user] for user in node.users if user in views]
        readers[node] = {user for user in node.users if user not in views}.union(*through)
    return readers


def _find_repeated(
    nodes: Sequence[fx.Node], views: Collection[fx.Node], loops: Collection[fx.Node], readers: Readers
) -> set[fx.Node]:
    """The loops that every reader computes again, by Inductor's rules: short, of few inputs, and cheap."""
    found: set[fx.Node] = set()
    heavy: dict[fx.Node, set[Any]] = {}
    reads: dict[fx.Node, set[fx.Node]] = {}
    length: Counter[fx.Node] = Counter()
    for node in nodes:
        packet = packet_of(node)
        reads[node], heavy[node] = set(), {packet} & HEAVY
        for source in node.all_input_nodes:
            is_open = source in found or source in views
            reads[node] |= reads.get(source, {source}) if is_open else {source}
            heavy[node] |= heavy.get(source, set()) if is_open else set()
            length[node] += length[source] if is_open else 0
        length[node] += node not in views
        is_light = not heavy[node] or (len(heavy[node]) <= MOST_HEAVY and _reads_little(node, reads[node]))
        is_dear = packet in REDUCTIONS or (not is_light and len(readers[node]) > 1)
        most = MOST_READS if len(readers[node]) > 1 else MOST_READS_OF_ONE
        is_short = len(reads[node]) <= most and length[node] <= MOST_OPERATORS
        if node in loops and (packet in CONSTANTS or (is_short and not is_dear)):
            found.add(node)
    return found


def _reads_little(node: fx.Node, reads: Collection[fx.Node]) -> bool:
    made = elements_nbytes(node)
    return made >= LEAST_NBYTES and sum(map(elements_nbytes, reads)) <= MOST_READ * made


def _is_loop(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_of_library(node)
