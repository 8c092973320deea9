"""PyTorch's own modules, as its tests make them, judged like its operators (`op_judge`)."""

from typing import Any

import pytest
import torch
from op_judge import judge, module_samples
from torch.testing._internal.common_modules import module_db


def _cases() -> list[Any]:
    return [
        pytest.param(info, id=info.name, marks=[] if index % 15 == 0 else [pytest.mark.slow])
        for index, info in enumerate(module_db)
    ]


@pytest.mark.parametrize("info", _cases())
def test_the_gradient_is_right_or_predicted(info: Any) -> None:
    """Of the first of its configurations that can be judged; ``op_judge.py`` judges all of them."""
    torch.manual_seed(0)
    for module, leaves, spec in module_samples(info):
        torch.manual_seed(0)
        verdict = judge(module, leaves, spec, 8, seed=0)
        assert verdict.kind in ("right", "untraced", "unstable"), verdict
        if verdict.kind == "right":
            return
    pytest.skip("nothing in it can be judged: no floating input, not differentiable, or not the same twice")


def test_a_transformer_layer_whose_elements_lie_in_another_order() -> None:
    """Once a view that its backward takes could not be taken of what was measured, and there was no plan."""
    info = next(info for info in module_db if info.name == "nn.TransformerEncoderLayer")
    torch.manual_seed(0)
    module, leaves, spec = list(module_samples(info))[37]
    torch.manual_seed(0)
    verdict = judge(module, leaves, spec, 8, seed=0)
    assert verdict.kind == "right", verdict
