"""The passes: the table of contents of the compiler.

`PIPELINE` lists the passes in the order in which they run over one graph of a model, from the joint graph that
AOTAutograd traces to the pair that the inner compiler gets: first with every code at 8 bits, for profiling, then by the
plan. A pass is a file of this folder with a function of its name, and a line here. The other files serve the passes:

- ``find_batched_products``, ``find_joins`` and ``is_cheap`` are analyses behind `mark_recomputation`;
- ``find_refusals``, ``find_copies``, ``find_masks``, ``find_readers``, ``find_bends``, ``find_standardizations``,
  ``merge_masks`` and ``bound_indices`` are analyses behind `decide_eligibility`;
- ``exponentiate_again`` is a part of `multiply_in_turn`;
- ``decode_again``, ``keep_parts``, ``keep_narrow`` and ``add_in_turn`` are what `lower_peak` does, ``backward_peak``
  what it looks at;
- ``encodings``, ``graph_analysis``, ``forward_editor``, ``standardize``, ``reads`` and ``load_blob`` say, write and
  read what is stored, ``stored_memory`` says what that leads to in memory;
- ``split_cross_entropy``, with its analysis ``find_heads``, runs before all of them, on the calls of the model's own
  code, which AOTAutograd then differentiates;
- ``pipeline`` runs the passes, and ``verify_graphs`` checks what they made.
"""

from gact_fx.options import is_share
from gact_fx.passes.add_in_place import add_in_place
from gact_fx.passes.cast_late import cast_late
from gact_fx.passes.choose_products import choose_products
from gact_fx.passes.copy_for_replay import copy_for_replay
from gact_fx.passes.copy_mutated_inputs import copy_mutated_inputs
from gact_fx.passes.decide_eligibility import decide_eligibility
from gact_fx.passes.decode_at_use import decode_at_use
from gact_fx.passes.defer_recomputation import defer_recomputation
from gact_fx.passes.draw_masks import draw_masks
from gact_fx.passes.expose_decisions import expose_decisions
from gact_fx.passes.find_attention import find_attention
from gact_fx.passes.find_plan import find_plan
from gact_fx.passes.find_saved_tensors import find_saved_tensors
from gact_fx.passes.fuse_codec import fuse_codec, fuses
from gact_fx.passes.hoist_views import hoist_views
from gact_fx.passes.insert_compression import insert_compression
from gact_fx.passes.lower_peak import lower_peak
from gact_fx.passes.mark_recomputation import mark_recomputation
from gact_fx.passes.merge_coefficients import merge_coefficients
from gact_fx.passes.move_cuts import move_cuts
from gact_fx.passes.multiply_in_turn import multiply_in_turn
from gact_fx.passes.name_sigmoids import name_sigmoids
from gact_fx.passes.partition import partition
from gact_fx.passes.pipeline import Pass
from gact_fx.passes.read_masks import read_masks
from gact_fx.passes.read_shapes import read_shapes
from gact_fx.passes.read_values import read_values
from gact_fx.passes.recompute_attention import recompute_attention
from gact_fx.passes.scatter_late import scatter_late
from gact_fx.passes.split_convolutions import split_convolutions
from gact_fx.passes.spread_numbers import spread_numbers
from gact_fx.passes.swap_codes import swap_codes
from gact_fx.passes.weigh_exact_pair import weigh_exact_pair
from gact_fx.passes.weigh_pair import weigh_pair
from gact_fx.passes.weigh_plain_cut import weigh_plain_cut

JOINT, FORWARD, BACKWARD, BOTH = ("joint",), ("forward",), ("backward",), ("forward", "backward")

PIPELINE: tuple[Pass, ...] = (
    Pass("weigh_plain_cut", weigh_plain_cut, gives="plain", when=lambda c: is_share(c.config.budget_bytes)),
    Pass("copy_mutated_inputs", copy_mutated_inputs, edits=JOINT, gives="copies"),
    Pass("name_sigmoids", name_sigmoids, edits=JOINT),
    Pass("find_attention", find_attention, gives="attention", when=lambda c: c.config.recompute != "off"),
    Pass("choose_products", choose_products, gives="products", when=lambda c: c.config.recompute == "full"),
    Pass("mark_recomputation", mark_recomputation, edits=JOINT, gives="is_free"),
    Pass("partition", partition, gives="pair"),
    Pass("read_shapes", read_shapes, edits=BACKWARD),
    Pass("recompute_attention", recompute_attention, edits=BACKWARD),
    Pass("expose_decisions", expose_decisions, edits=BACKWARD),
    Pass("merge_coefficients", merge_coefficients, edits=BACKWARD),
    Pass("move_cuts", move_cuts, edits=BOTH, gives="replaced"),
    Pass("hoist_views", hoist_views, edits=FORWARD),
    Pass("find_saved_tensors", find_saved_tensors, gives="saved"),
    Pass("decide_eligibility", decide_eligibility, gives="analysis"),
    Pass("find_plan", find_plan, gives="plan"),
    Pass("weigh_exact_pair", weigh_exact_pair, gives="exact_memory", when=lambda c: not c.is_profiling),
    Pass("insert_compression", insert_compression, edits=FORWARD, gives="reads", unfinished=True),
    Pass("read_masks", read_masks, edits=BACKWARD, gives="exact_masks", unfinished=True),
    Pass("read_values", read_values, edits=BACKWARD),
    Pass("defer_recomputation", defer_recomputation, edits=BACKWARD),
    Pass("spread_numbers", spread_numbers, edits=BOTH, when=lambda c: c.is_profiling),
    Pass("copy_for_replay", copy_for_replay, gives="replayable"),
    Pass("add_in_place", add_in_place, edits=BACKWARD, when=lambda c: not c.is_profiling),
    Pass("multiply_in_turn", multiply_in_turn, edits=BACKWARD, when=lambda c: not c.is_profiling),
    Pass("draw_masks", draw_masks, edits=BOTH, when=lambda c: not c.is_profiling),
    Pass("scatter_late", scatter_late, edits=BACKWARD, when=lambda c: not c.is_profiling),
    Pass("cast_late", cast_late, edits=BACKWARD, when=lambda c: not c.is_profiling),
    Pass("lower_peak", lower_peak, edits=BACKWARD, when=lambda c: not c.is_profiling),
    Pass("split_convolutions", split_convolutions, edits=BACKWARD, when=lambda c: not c.is_profiling),
    Pass("swap_codes", swap_codes, edits=BOTH, gives="swapped", when=lambda c: c.config.swap and not c.is_profiling),
    Pass("fuse_codec", fuse_codec, edits=BOTH, when=fuses),
    Pass("weigh_pair", weigh_pair, gives="memory"),
    Pass("decode_at_use", decode_at_use, edits=BACKWARD, when=lambda c: c.is_profiling),
)
