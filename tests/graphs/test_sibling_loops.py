"""Which loops Inductor runs as one when it compiles for us."""

import pytest
import torch
from peak_bytes import peak_bytes
from torch._inductor import config, metrics
from torch._inductor.virtualized import V

from gact_fx.graphs import sibling_loops
from gact_fx.graphs.sibling_loops import apart_unless_akin

LAYERS, ROWS, WIDTH = 8, 4096, 64


def turn(layers: list[torch.Tensor], table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What every layer computes with the same small table, as with that of a rotary embedding."""
    total = torch.zeros(())
    for layer in layers:
        total = total + ((layer * table).sin() @ weight).sum()
    return total


@pytest.mark.parametrize(("share", "at_once"), [(sibling_loops.SHARE, 2), (0, LAYERS)])
def test_layers_that_share_a_table_take_no_memory_at_once(
    share: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is what one layer computes, and its product; without a share, Inductor computes all layers in one loop."""
    monkeypatch.setattr(sibling_loops, "SHARE", share)
    layers = [torch.randn(ROWS, WIDTH) for _ in range(LAYERS)]
    table, weight = torch.randn(WIDTH), torch.randn(WIDTH, WIDTH)
    torch._dynamo.reset()
    compiled = torch.compile(turn)
    with apart_unless_akin(), config.patch(force_disable_caches=True, allow_buffer_reuse=False):
        expected = turn(layers, table, weight)
        torch.testing.assert_close(compiled(layers, table, weight), expected, rtol=1e-4, atol=1e-2)
    start = torch.zeros((), requires_grad=True)
    found = peak_bytes(lambda: start + compiled(layers, table, weight)).forward
    assert found / layers[0].nbytes == pytest.approx(at_once, abs=0.5 if share else 1.5)


def test_loops_that_read_the_same_stay_one() -> None:
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * y).sin(), (x * y).cos()

    torch._dynamo.reset()
    metrics.reset()
    with apart_unless_akin(), config.patch(force_disable_caches=True):
        torch.compile(both)(x, y)
    assert metrics.generated_kernel_count == 1


def test_inductor_is_as_before_behind_a_failure() -> None:
    before = V.choices
    with pytest.raises(RuntimeError, match="in between"), apart_unless_akin():
        assert V.choices is not before
        raise RuntimeError("in between")
    assert V.choices is before
