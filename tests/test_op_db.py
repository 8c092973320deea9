"""PyTorch's own operators, as its tests sample them, judged: no gradient is wrong without a word (`op_judge`)."""

from typing import Any

import pytest
import torch
from op_judge import judge, samples
from torch.testing._internal.common_methods_invocations import op_db

OPERATORS = [op for op in op_db if op.supports_autograd and torch.float32 in op.dtypes]
# Known to be wrong, with the reason. Several rounded tensors in one quotient or product of matrices: their errors
# multiply, and are predicted one by one.
KNOWN = {"addcdiv", "matrix_exp", "_softmax_backward_data", "__rdiv__"}


def _cases() -> list[Any]:
    found = []
    for index, op in enumerate(OPERATORS):
        name = f"{op.name} {op.variant_test_name}".strip()
        marks = [] if index % 10 == 0 else [pytest.mark.slow]
        if op.name.removeprefix("torch.ops.aten.").removesuffix(".default") in KNOWN:
            marks.append(
                pytest.mark.xfail(
                    reason="errors of several tensors multiply, or a pole's spike is seen too late", strict=False
                )
            )
        found.append(pytest.param(op, id=name, marks=marks))
    return found


@pytest.mark.parametrize("op", _cases())
def test_the_gradient_is_right_or_predicted(op: Any) -> None:
    torch.manual_seed(0)
    judged = False
    for leaves, spec in samples(op):
        torch.manual_seed(0)
        verdict = judge(op.op, leaves, spec, 8)
        judged |= verdict.kind not in ("untraced", "unstable")
        assert verdict.kind in ("right", "untraced", "unstable"), verdict
    if not judged:
        pytest.skip("nothing in it can be judged: no floating input, not differentiable, or not the same twice")
