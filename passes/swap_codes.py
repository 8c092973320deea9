"""Move blobs to host memory in forward, and back ahead of their use in backward.

A blob leaves the device as soon as it is made. Backward asks for it `PREFETCH` decompressions before its own, so that
the copy runs beside the computation, and waits for it right before that. What is kept exact stays where it is.

On the CPU, where most tests run these graphs, the copies are copies within host memory.
"""

from collections.abc import Collection

import torch
from torch import fx

from gact_fx.codec import host_copies  # noqa: F401  (registers its operators)
from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.edit import add_call
from gact_fx.passes.pipeline import Context

compress = torch.ops.gact_fx.compress.default
to_host, fetch, arrive = (getattr(torch.ops.gact_fx, name).default for name in ("to_host", "fetch", "arrive"))
# How many decompressions ahead of its own a blob is asked for; as many are on their way at a time.
PREFETCH = 2


def swap_codes(pair: GraphPair, context: Context, devices: Collection[str] = ("cuda",)) -> frozenset[str]:
    """Rewrite ``pair`` in place for the blobs on ``devices`` (types); returns the slots whose blobs are moved."""
    moved = _send(pair, devices)
    graph = pair.backward.graph
    uses = {value.placeholder: min(value.placeholder.users) for value, _ in moved if value.placeholder.users}
    home = {value.placeholder: device for value, device in moved}
    order = sorted(uses, key=lambda placeholder: uses[placeholder])
    start = next(node for node in graph.nodes if node.op != "placeholder")
    fetched = {}
    for index, placeholder in enumerate(order):
        arguments = (placeholder, home[placeholder])
        with graph.inserting_before(uses[order[index - PREFETCH]] if index >= PREFETCH else start):
            fetched[placeholder] = add_call(graph, fetch, arguments, f"{placeholder.name}_fetched")
    # Behind what is fetched ahead at the same place, which need not wait.
    for placeholder, blob in fetched.items():
        with graph.inserting_before(uses[placeholder]):
            add_call(graph, arrive, (blob,), f"{placeholder.name}_arrived")
        placeholder.replace_all_uses_with(blob, delete_user_cb=lambda user: user.target is not fetch)
    return frozenset(value.name for value, _ in moved)


def _send(pair: GraphPair, devices: Collection[str]) -> list[tuple[SavedValue, torch.device]]:
    """Save host copies of the blobs on ``devices``; what was moved, and where from."""
    graph = pair.forward.graph
    hosts: dict[fx.Node, fx.Node] = {}
    moved = []
    for value in pair.saved_values():
        blob = value.source
        if blob.target is not compress or blob.meta["val"].device.type not in devices:
            continue
        # Views of one buffer share a blob.
        if blob not in hosts:
            with graph.inserting_after(blob):
                hosts[blob] = add_call(graph, to_host, (blob,), f"{blob.name}_host")
        pair.replace_saved(value, hosts[blob])
        moved.append((value, blob.meta["val"].device))
    return moved
