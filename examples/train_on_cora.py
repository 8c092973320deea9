"""Train the graph nets of torch_geometric on Cora, activations in 4 bits.

    python examples/train_on_cora.py [gcn gat sage gin]

Looks for planetoid's files as ``benchmarks/real_data.py`` says. Each network is trained uncompressed and compressed,
from the same weights, for 200 epochs of one step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import gact_fx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from real_data import cora

NETWORKS = {"gcn": GCN, "gat": GAT, "sage": GraphSAGE, "gin": GIN}


def build(name: str, data: Data, seed: int = 0, dropout: float = 0.5) -> nn.Module:
    """Two layers of width 64 (GAT: 8 heads of 8)."""
    torch.manual_seed(seed)
    options = {"heads": 8} if name == "gat" else {}
    classes = int(data.y.max()) + 1
    network: nn.Module = NETWORKS[name](data.num_features, 64, 2, classes, dropout=dropout, **options)
    return network


def step(model: nn.Module, data: Data) -> torch.Tensor:
    """The loss on the labelled nodes."""
    logits = model(data.x, data.edge_index)
    return nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])


def train(model: nn.Module, data: Data, epochs: int = 200) -> float:
    """Accuracy on the test nodes, after the epoch that was best on the validation nodes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    best = accuracy = 0.0
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        step(model, data).backward()
        optimizer.step()
        model.train(False)
        with torch.no_grad():
            right = model(data.x, data.edge_index).argmax(1) == data.y
        validation = float(right[data.val_mask].float().mean())
        if validation >= best:
            best, accuracy = validation, float(right[data.test_mask].float().mean())
    return accuracy


def main() -> None:
    data = cora()
    for name in sys.argv[1:] or NETWORKS:
        exact = train(build(name, data), data)
        model = gact_fx.compile(build(name, data), budget_bits=4)
        accuracy = train(model, data)
        report = gact_fx.inspect(model)
        print(
            f"{name}: test accuracy {accuracy:.3f}, uncompressed {exact:.3f}; held for backward "
            f"{report.bytes_after / 1e6:.2f} MB instead of {report.bytes_before / 1e6:.2f} MB ({report.ratio:.1f}x)",
            flush=True,
        )


if __name__ == "__main__":
    main()
