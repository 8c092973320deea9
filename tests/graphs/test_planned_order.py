"""Which loops Inductor runs as one when it compiles for us."""

import pytest
import torch
from peak_bytes import peak_bytes
from torch._inductor import config, metrics
from torch._inductor.virtualized import V

from gact_fx.graphs import planned_order
from gact_fx.graphs.planned_order import in_planned_order

LAYERS, ROWS, WIDTH = 8, 4096, 64


def turn(layers: list[torch.Tensor], table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What every layer computes with the same small table, as with that of a rotary embedding."""
    total = torch.zeros(())
    for layer in layers:
        total = total + ((layer * table).sin() @ weight).sum()
    return total


@pytest.mark.parametrize(("share", "at_once"), [(planned_order.SHARE, 2), (0, LAYERS)])
def test_layers_that_share_a_table_take_no_memory_at_once(
    share: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is what one layer computes, and its product; without a share, Inductor computes all layers in one loop."""
    monkeypatch.setattr(planned_order, "SHARE", share)
    monkeypatch.setattr(planned_order, "SMALL", 1e9)
    layers = [torch.randn(ROWS, WIDTH) for _ in range(LAYERS)]
    table, weight = torch.randn(WIDTH), torch.randn(WIDTH, WIDTH)
    torch._dynamo.reset()
    compiled = torch.compile(turn)
    with in_planned_order(), config.patch(force_disable_caches=True, allow_buffer_reuse=False):
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
    with in_planned_order(), config.patch(force_disable_caches=True):
        torch.compile(both)(x, y)
    assert metrics.generated_kernel_count == 1


def late(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The exponential is for a late product, and computed of what is read first and last."""
    first = x.sin()
    scaled = weight[:, :8] * ((first @ weight).sin() @ weight).sum().tanh()
    return first.exp() @ scaled + first @ scaled


@pytest.mark.parametrize(("small", "at_once"), [(planned_order.SMALL, 3), (1e9, 4)])
def test_loops_on_both_sides_of_a_product_stay_apart(
    small: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rule, the loop of the sine computes the exponential, too, which is in memory from there on."""
    monkeypatch.setattr(planned_order, "SMALL", small)
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    torch._dynamo.reset()
    compiled = torch.compile(late)
    with in_planned_order(), config.patch(force_disable_caches=True, allow_buffer_reuse=False):
        torch.testing.assert_close(compiled(x, weight), late(x, weight), rtol=1e-3, atol=1e-2)
    start = torch.zeros((), requires_grad=True)
    found = peak_bytes(lambda: start + compiled(x, weight)[0, 0]).forward
    assert found / x.nbytes == pytest.approx(at_once, abs=0.5)


def test_inductor_is_as_before_behind_a_failure() -> None:
    before = V.choices
    with pytest.raises(RuntimeError, match="in between"), in_planned_order():
        assert V.choices is not before
        raise RuntimeError("in between")
    assert V.choices is before
