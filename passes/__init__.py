"""The passes, in the order in which they run on one model.

1. ``mark_recomputation``   in the joint graph: what backward may compute again, and what must be saved
   (``share_softmax``       log-softmax's exponential, in backward, from forward's, where scores were capped;
   ``choose_products``      which matrix products and attention, with recompute="full";
   PyTorch's min-cut partitioner then cuts the joint graph in two)
2. ``recompute_attention``  fused attention's logsumexp is computed again in backward, from what query and key became
3. ``expose_decisions``     ReLU, clamp and the like as comparisons, in backward
4. ``find_saved_tensors``   what forward keeps for backward, and who else holds it
5. ``decide_eligibility``   which of it may be compressed, and how, with a reason for each refusal
   (``find_masks``          the decisions backward takes from saved values, to be stored exactly;
   ``find_substitutes``     what to store instead of a value that backward reads through a nonlinear chain;
   ``find_standardizations`` what batch norm reads, to be coded as it normalises it, folded by the mask behind it;
   ``merge_masks``          the mask that codes can tell as well, if the plan says so, and the arithmetic of it;
   ``bound_indices``        the range of indices, which are packed)
6. ``measure_adjoint``      how much each tensor's rounding error moves the gradient, on a real step
   (``cut_backward``        the segments in which that is done, so that it fits in memory;
   ``measure_sensitivity``  the same one tensor at a time, by GACT's Algorithm 1;
   ``measure_rounding``     the error that every width, rounding and group size makes;
   ``find_crossings``       activations that several graphs hold, to be stored once)
7. ``list_choices``         the ways in which each tensor may be stored, with bytes and variance
8. ``allocate_bits``        one of them for each tensor, under the budget of the whole model
9. ``insert_compression``   compress into forward, decompress into backward
   (``insert_decompression`` the latter;
   ``standardize``          the arithmetic before and after)
10. ``defer_recomputation`` what backward computes from saved values, right before its first use
11. ``verify_graphs``       the contract with AOTAutograd
12. ``swap_codes``          blobs to host memory and back ahead of their use, with swap=True and on a GPU; not in the
   graphs that are profiled or replayed; 11 runs again behind it
13. ``fuse_codec``          compress and decompress spelled out for Inductor to fuse, where that is the faster way

1 to 5 and 9 to 13 run when a graph is compiled: first at 8 bits, for profiling, then by the plan. 6 runs on recorded
training steps, 7 and 8 once for all graphs. Only 2, 3, 9, 10, 12 and 13 edit graphs, and
``share_softmax`` the joint one. ``gact_fx.training.rewrite`` runs those on
graph pairs, times them, and keeps the graphs' text before and after each edit.
"""
