"""The one-line use: compile, train, and look at what was stored how.

python examples/quickstart.py
python examples/quickstart.py --inner eager  # where there is no C++ compiler, which Inductor needs on a CPU
"""

import argparse

import torch

import gact_fx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", default="inductor", choices=("inductor", "eager"), help="what compiles the graphs")
    inner = parser.parse_args().inner
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, activation="gelu", batch_first=True)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(128, 10))
    model = gact_fx.compile(model, budget_bits=4, inner=inner)  # the only line that is new

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):  # step 0 is the sample, on which the bits are chosen
        x, y = torch.randn(16, 64, 128), torch.randint(0, 10, (16 * 64,))
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    print(gact_fx.inspect(model))


if __name__ == "__main__":
    main()
