import torch
from conftest import Trace, run_pass
from torch import nn

from gact_fx.graphs.aot import GraphPair
from gact_fx.records import SavedTensor


def saved_by(pair: GraphPair) -> tuple[SavedTensor, ...]:
    return run_pass("find_saved_tensors", pair).saved


def test_owners_shapes_and_order(trace: Trace) -> None:
    model = nn.Linear(16, 32)
    pair = trace(lambda x: model(x).tanh().sum(), torch.randn(8, 16))
    saved = saved_by(pair)
    assert [value.name for value in pair.saved_values()] == [tensor.name for tensor in saved]
    by_owner = {tensor.owner: tensor for tensor in saved}
    assert by_owner["caller"].shape == (8, 16)
    assert by_owner["nobody"].op == "aten.tanh"
    assert (by_owner["nobody"].nbytes, by_owner["nobody"].stride) == (8 * 32 * 4, (32, 1))


def test_a_saved_parameter_is_known_as_one(trace: Trace) -> None:
    first, second = nn.Linear(16, 32), nn.Linear(32, 4)
    saved = saved_by(trace(lambda x: second(first(x).tanh()).sum(), torch.randn(8, 16)))
    assert [t.op for t in saved if t.owner == "parameter"]


def test_views_of_one_buffer_share_a_storage(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 16))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (y * y.t().sin()).sum()  # saves y, and what it is multiplied with

    saved = saved_by(trace(function, torch.randn(16, 16)))
    storages = [t.storage for t in saved if t.owner == "nobody"]
    assert len(storages) >= len(set(storages))
    for tensor in saved:
        assert tensor.storage_nbytes >= tensor.nbytes or tensor.owner != "nobody"


def test_upstream_inputs_belong_to_nobody(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 16))
    hidden = torch.randn(8, 16, requires_grad=True) * 1
    keys = {t.owner: t.key for t in saved_by(trace(lambda x: (x @ w).sum(), hidden, upstream=True))}
    # Counted first, in whatever order a graph has its inputs.
    assert keys == {"nobody": "input#0", "parameter": "input#1"}
