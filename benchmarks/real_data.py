"""Real data for the benchmarks that train: a subset of CIFAR-10, Shakespeare's plays as one text, the graph Cora.

They are looked for in the folder that the environment variable GACT_FX_DATA names, else in ``shared/data`` beside the
repository's folder: ``cifar10_subset.npz`` (x_train, x_test: uint8 images, N x 32 x 32 x 3; y_train, y_test: labels
from 0 to 9), ``tinyshakespeare.txt``, and ``cora`` with planetoid's files (``ind.cora.x`` and so on). Nothing is
downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_geometric.data import Data

VARIABLE = "GACT_FX_DATA"
DEFAULT = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


def find(name: str) -> Path:
    """The file ``name`` in the data folder.

    Raises:
        FileNotFoundError: it is not there.
    """
    path = Path(os.environ.get(VARIABLE) or DEFAULT) / name
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: set {VARIABLE} to the folder that holds {name}")
    return path


def cifar10() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images, train labels, test images, test labels; images NCHW, normalised by the training set's channels."""
    with np.load(find("cifar10_subset.npz")) as arrays:
        x_train, y_train, x_test, y_test = (
            torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test")
        )
    x_train, x_test = (x.permute(0, 3, 1, 2).float().contiguous() / 255 for x in (x_train, x_test))
    deviation, mean = torch.std_mean(x_train, (0, 2, 3), keepdim=True)
    return (x_train - mean) / deviation, y_train.long(), (x_test - mean) / deviation, y_test.long()


def tinyshakespeare() -> str:
    """One million characters, 65 different ones."""
    return find("tinyshakespeare.txt").read_text(encoding="utf-8")


def cora() -> Data:
    """The citation graph Cora with its public split: rows of word counts, each normalised to a sum of one."""
    from torch_geometric.io import read_planetoid_data
    from torch_geometric.transforms import NormalizeFeatures

    folder = find("cora/ind.cora.x").parent
    data: Data = NormalizeFeatures()(read_planetoid_data(str(folder), "cora"))
    return data
