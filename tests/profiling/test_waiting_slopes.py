import torch
from torch import fx

from gact_fx.codec.packed_tensors import Packed
from gact_fx.profiling.waiting_slopes import WaitingSlopes, unpacked


def test_parts_add_up_and_wait_in_codes() -> None:
    graph = fx.Graph()
    node, slopes = graph.placeholder("x"), WaitingSlopes()
    parts = [[torch.randn(64, 256) for _ in range(2)] for _ in range(3)]
    for part in parts:
        for probe, slope in enumerate(part):
            slopes.add(node, probe, slope)
    wanted = [torch.stack(of_probe).sum(0) for of_probe in zip(*parts, strict=True)]
    assert node in slopes
    for found, whole in zip(slopes.of_placeholders()["x"], wanted, strict=True):
        # Each of the three times that a part is put into codes adds 3 % of the norm.
        assert torch.linalg.vector_norm(unpacked(found) - whole) < 0.06 * torch.linalg.vector_norm(whole)
    taken = slopes.take(node)
    assert node not in slopes and slopes.take(node) == []
    assert all(isinstance(waiting, Packed) and waiting.blob.nbytes < 64 * 256 * 0.9 for waiting in taken)
    slopes.put_back({node: taken})
    assert [unpacked(waiting).shape for waiting in slopes.take(node)] == [(64, 256)] * 2
