"""Where a graph runs operator by operator, a decoded value is there when it is read, and not in between."""

import pytest
import torch
from conftest import Trace, passes
from test_lower_peak import Skips, Stream, compressed, results
from torch import nn

from gact_fx.config import Config
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call
from gact_fx.graphs.fused_loops import is_of_library
from gact_fx.passes.backward_peak import decompress
from gact_fx.passes.pipeline import Context, run_passes
from gact_fx.passes.verify_graphs import verify_graphs


def decode_at_use(pair: GraphPair) -> None:
    run_passes(passes("decode_at_use"), Context(Config(), is_profiling=True, pair=pair))


@pytest.mark.both_compilers
@pytest.mark.parametrize(("make", "inner"), [(Stream, "inductor"), (Skips, "inductor"), (Skips, "eager")])
def test_no_decoded_value_is_held_from_one_product_to_the_next(trace: Trace, make: type[nn.Module], inner: str) -> None:
    model = make()
    pair, saved = compressed(trace, model, inner)
    before = results(pair, model)
    count = len(pair.backward.graph.find_nodes(op="call_function", target=decompress))
    decode_at_use(pair)
    verify_graphs(pair, saved)
    decodings = pair.backward.graph.find_nodes(op="call_function", target=decompress)
    assert len(decodings) > count
    order = list(pair.backward.graph.nodes)
    products = [at for at, node in enumerate(order) if is_of_library(node) and node.target is not decompress]
    for decoding in decodings:
        start, end = order.index(decoding), max(map(order.index, decoding.users))
        assert sum(start < at < end for at in products) == 0
    for found, expected in zip(results(pair, model), before, strict=True):
        assert torch.equal(found, expected)


def test_nothing_is_decoded_again_where_backward_writes(trace: Trace) -> None:
    """Behind the write, what is computed again might be another value."""
    pair, _ = compressed(trace, Skips(), "eager")
    graph = pair.backward.graph
    output = graph.output_node()
    gradient = next(node for node in output.all_input_nodes if node.op == "call_function")
    with graph.inserting_before(output):
        add_call(graph, torch.ops.aten.add_.Tensor, (gradient, gradient), "doubled")
    before = [str(node) for node in graph.nodes]
    decode_at_use(pair)
    assert [str(node) for node in graph.nodes] == before
