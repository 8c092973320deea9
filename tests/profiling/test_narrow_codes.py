"""The graphs of a step whose codes are narrower than those of the rows that are measured."""

from typing import Any

import pytest
import torch
from conftest import gradients
from test_lower_peak import Stream
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import gact_fx
from gact_fx.codec.code import MASK_CODE, Code
from gact_fx.graphs.compilers import Compiled, interpret_in_blocks
from gact_fx.profiling import few_rows, narrow_codes
from gact_fx.profiling.narrow_codes import view_masks
from gact_fx.training import row_tracing

compress, decompress = torch.ops.gact_fx.compress.default, torch.ops.gact_fx.decompress.default
SHAPE = (64, 64)


def first_gradient() -> list[torch.Tensor]:
    """That of a step that is recorded."""
    torch.manual_seed(0)
    model, x = Stream(depth=6), torch.randn(32, 3, 32, 32)
    gact_fx.compile(model, inner="inductor")
    model(x).backward()
    return gradients(model)


def test_sums_of_a_residual_stream_are_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read behind something else is narrow as well: the gradient is what it is without."""
    behind: list[int] = []

    def interpret(graph: fx.GraphModule) -> Compiled:
        behind.append(len(graph.graph.find_nodes(op="call_function", target=torch.ops.gact_fx.behind.default)))
        return interpret_in_blocks(graph)

    for module in (few_rows, row_tracing):
        monkeypatch.setattr(module, "ENOUGH_NBYTES", 2**13)
    monkeypatch.setattr(narrow_codes, "interpret_in_blocks", interpret)
    found = first_gradient()
    assert sum(behind) > 0
    behind.clear()
    monkeypatch.setattr(narrow_codes, "lower", lambda pair, **options: None)
    torch.testing.assert_close(found, first_gradient(), rtol=1e-4, atol=1e-6)
    assert sum(behind) == 0


def graph_of(code: Code) -> fx.Graph:
    """Whether what a blob stands for, in bytes, is more than a half."""
    graph = fx.Graph()
    dense = graph.call_function(decompress, (graph.placeholder("blob"), SHAPE, torch.uint8, *code.to_decompress()))
    with FakeTensorMode():
        dense.meta["val"] = torch.zeros(SHAPE, dtype=torch.uint8)
    number = graph.call_function(torch.ops.prims.convert_element_type.default, (dense, torch.float32))
    graph.output(graph.call_function(torch.ops.aten.gt.Scalar, (number, 0.5)))
    return graph


def test_masks_are_read_as_they_are() -> None:
    mask = torch.rand(SHAPE) < 0.3
    blob = compress(mask, *MASK_CODE.to_compress())
    graph = graph_of(MASK_CODE)
    view_masks(graph)
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.gt.Scalar)) == 0
    found: Any = fx.Interpreter(fx.GraphModule({}, graph)).run(blob)
    assert found.dtype is torch.bool and torch.equal(found, mask)


def test_bytes_that_are_no_mask_are_compared() -> None:
    graph = graph_of(Code(8))
    view_masks(graph)
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.gt.Scalar)) == 1
