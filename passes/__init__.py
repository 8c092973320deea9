"""The passes, in the order in which they run on one forward and backward graph.

1. ``recompute_attention``  fused attention's logsumexp is computed again in backward, from what query and key became
2. ``find_saved_tensors``   what forward keeps for backward, and who else holds it
3. ``decide_eligibility``   which of it may be compressed, and how, with a reason for each refusal
   (``find_masks``          the decisions backward takes from saved values, to be stored exactly;
   ``find_substitutes``     what to store instead of a value that backward reads through a nonlinear chain)
4. ``measure_sensitivity``  how much each tensor's rounding error moves the gradient, on a real step
5. ``allocate_bits``        a width for each tensor, under the budget of the whole model
6. ``insert_compression``   compress into forward, decompress into backward
7. ``verify_graphs``        the contract with AOTAutograd
8. ``fuse_codec``           compress and decompress spelled out for Inductor to fuse, where that is the faster way

1 to 3 run when a graph is compiled, 4 on sample batches, 5 once for all graphs, 6 to 8 when a graph is compiled with
the plan. Only 1, 6 and 8 edit graphs. ``gact_fx.driver`` runs them, times them, and keeps the graphs' text before and
after each edit.
"""

from gact_fx.passes.allocate_bits import Item, allocate_bits
from gact_fx.passes.decide_eligibility import decide_eligibility
from gact_fx.passes.find_masks import find_masks
from gact_fx.passes.find_saved_tensors import find_saved_tensors
from gact_fx.passes.find_substitutes import find_substitutes
from gact_fx.passes.fuse_codec import fuse_codec
from gact_fx.passes.insert_compression import insert_compression
from gact_fx.passes.measure_sensitivity import measure_sensitivity, step_variance
from gact_fx.passes.recompute_attention import recompute_attention
from gact_fx.passes.verify_graphs import GraphVerificationError, verify_graphs

__all__ = [
    "GraphVerificationError",
    "Item",
    "allocate_bits",
    "decide_eligibility",
    "find_masks",
    "find_saved_tensors",
    "find_substitutes",
    "fuse_codec",
    "insert_compression",
    "measure_sensitivity",
    "recompute_attention",
    "step_variance",
    "verify_graphs",
]
