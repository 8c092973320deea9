"""The elements that masks stop, of tensors whose codes could tell such a mask: for measuring what merging it does."""

import torch

from gact_fx.graphs.replay import Replay
from gact_fx.passes.merge_masks import Stopped, measure_stopped
from gact_fx.passes.read_masks import MASK_OF
from gact_fx.profiling.tape import Step


class StoppedElements:
    """Evaluates the masks of one recorded step, one when it is asked for."""

    def __init__(self, step: Step) -> None:
        self._tensors = step.readings
        self._mergeable = {how.name: how for _, how in step.analysis.quantized() if how.merges}
        nodes = step.backward.graph.nodes
        self._masks = {node.meta[MASK_OF]: node.name for node in nodes if MASK_OF in node.meta}
        self._replay = Replay(step.backward, step.arguments) if self._mergeable else None

    def __call__(self, reading: str, values: torch.Tensor) -> Stopped | None:
        """Of the tensor whose ``values`` the backward node ``reading`` has; None where no mask can be merged."""
        how = self._mergeable.get(self._tensors[reading])
        mask = self._masks.get(how.merges) if how is not None else None
        if how is None or mask is None or self._replay is None:
            return None
        found = self._replay.evaluate({mask})[mask]
        channel = None if how.merges_losslessly else how.order.index(1)
        return measure_stopped(values, found.permute(how.order), channel)
