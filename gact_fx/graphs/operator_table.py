"""What gact_fx knows of operators by name, in one place: each table says what it says of those in it.

What an operator computes is found out by numbers instead (`linearity`), and what codes of its inputs do to the gradient
is measured. What is left is where elements go, which arguments are positions, and what neither can tell.
"""

from typing import Any

import torch

import gact_fx.graphs.linear_cross_entropy
import gact_fx.graphs.recurrent_layer  # noqa: F401 (their operators are in the tables)

aten, prims = torch.ops.aten, torch.ops.prims
Table = frozenset[Any]

# Their result is their input, by another name.
NAMES: Table = frozenset({aten.detach, aten.alias})
# Their result has the elements of their input in the same order, in another shape.
RESHAPES: Table = NAMES | {aten.view, aten.reshape, aten._unsafe_view, aten.squeeze, aten.unsqueeze}
# Their result has the elements of their input, each once.
REORDERS: Table = RESHAPES | {aten.permute, aten.transpose, aten.t, aten.clone}
# Their result has the elements of their input, in another dtype.
CASTS: Table = frozenset({aten._to_copy, prims.convert_element_type})
# They move or copy elements, or leave some out, and compute nothing.
MOVES: Table = REORDERS | {
    aten.expand, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.as_strided, aten.cat,
    aten.constant_pad_nd, aten.flip, aten.roll, aten.diagonal, aten.unfold, aten.index, aten._unsafe_index, aten.gather,
    aten.index_select, aten.embedding,
}  # fmt: skip
# They make a tensor of numbers.
CONSTANTS: Table = frozenset(
    {aten.full, aten.full_like, aten.ones_like, aten.zeros_like, aten.scalar_tensor, aten.arange, aten.empty}
)
# They add elements where an index says.
SCATTERS: Table = frozenset({aten.scatter_add, aten.scatter_reduce, aten.index_add, aten.index_put, aten.scatter})
# They are linear in each of their arguments, and mix elements.
PRODUCTS: Table = frozenset(
    {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.mv, aten.dot, aten.sum, aten.mean, aten.cumsum}
)
# Their results are statistics of rows, of which there are few, and on each depends every element of the row.
REDUCTIONS: Table = frozenset(
    {aten.mean, aten.sum, aten.amax, aten.amin, aten.max, aten.min, aten.var_mean, aten.var, aten.std, aten.logsumexp,
     aten.prod, aten.norm, aten.linalg_vector_norm}
)  # fmt: skip
# Of several results these, by position, are statistics of rows or channels.
STATISTICS: dict[object, tuple[int, ...]] = {
    aten.native_layer_norm: (1, 2), aten.native_group_norm: (1, 2), aten.native_batch_norm: (1, 2),
    aten._native_batch_norm_legit: (1, 2), aten._native_batch_norm_legit_functional: (1, 2, 3, 4),
    aten._scaled_dot_product_flash_attention_for_cpu: (1,), aten._scaled_dot_product_flash_attention: (1,),
    aten._scaled_dot_product_efficient_attention: (1,), aten._scaled_dot_product_cudnn_attention: (1,),
    torch.ops.gact_fx.linear_cross_entropy: (0, 1),
}  # fmt: skip
# Fused attention's backward and its forward: on the CPU; on a GPU in half precision; there with masks, or in float32;
# and cuDNN's. Their schemas name alike what they share.
FUSED_ATTENTION: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_backward.default: aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default: aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default: aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip
# Of several results these, by position, are the mean of every channel and 1 / deviation.
BATCH_NORMS: dict[object, tuple[int, int]] = {
    aten._native_batch_norm_legit_functional: (1, 2), aten.native_batch_norm: (1, 2),
    aten._native_batch_norm_legit: (1, 2),
}  # fmt: skip
# Derivatives that mix elements, so that numbers cannot tell, and those of their arguments, by position or name, in
# which they are not linear.
NONLINEAR: dict[object, tuple[int | str, ...]] = {
    aten._log_softmax_backward_data: (1,), aten.binary_cross_entropy_backward: (1,), aten._cdist_backward: (1, 2, 4),
    aten._pdist_backward: (1, 3), aten.grid_sampler_2d_backward: (2,), aten.grid_sampler_3d_backward: (2,),
    aten.cudnn_grid_sampler_backward: (1,),
    aten.multi_margin_loss_backward: (1,), aten.multilabel_margin_loss_backward: (1,),
    aten._segment_reduce_backward: (1, 2), aten._prelu_kernel_backward: (1,), aten.rrelu_with_noise_backward: (1,),
    aten._fake_quantize_learnable_per_tensor_affine_backward: (1, 2, 3),
    aten._fake_quantize_learnable_per_channel_affine_backward: (1, 2, 3),
    # Probabilities of alignments, as logarithms.
    aten._ctc_loss_backward: (1, 6),
    # What logits are computed from again, and what they are exponentiated against.
    torch.ops.gact_fx.linear_cross_entropy_backward: (2, 3, 4, 7),
    # The matrix of a system of equations.
    aten.linalg_solve_triangular: (0,), aten.linalg_lu_solve: (0,), aten._linalg_solve_ex: (0,),
    aten.linalg_inv_ex: (0,), aten.triangular_solve: (1,), aten.cholesky_solve: (1,), aten.cholesky_inverse: (0,),
    aten.linalg_ldl_solve: (0,),
    # query and key, whose product is exponentiated against an exact logsumexp, and the mask that is added to it.
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 2, "attn_mask"),
    aten._scaled_dot_product_flash_attention_backward: (1, 2),
    aten._scaled_dot_product_efficient_attention_backward: (1, 2, 4),
    aten._scaled_dot_product_cudnn_attention_backward: (1, 2, 8),
    aten._scaled_dot_product_fused_attention_overrideable_backward: (1, 2, 4),
    # Computed again they are bounded, but a mask of zeros and the lowest number has no steps in between.
    aten._scaled_dot_product_flash_attention_for_cpu: ("attn_mask",),
    aten._scaled_dot_product_efficient_attention: (3,), aten._scaled_dot_product_cudnn_attention: (3,),
    aten._scaled_dot_product_fused_attention_overrideable: (3,),
}  # fmt: skip
# Derivatives of what they compute again from these arguments, by position: exact for rounded ones, but bent.
COMPUTED_AGAIN: dict[object, tuple[int, ...]] = {torch.ops.gact_fx.recurrent_layer_backward: (3, 4, 5)}
# They return positions along one dimension: the result that does (None: the only one), and which argument names the
# dimension, with its default.
POSITIONS: dict[object, tuple[int | None, int, int | None]] = {
    aten.argmax.default: (None, 1, None), aten.argmin.default: (None, 1, None), aten.argsort.default: (None, 1, -1),
    aten.max.dim: (1, 1, None), aten.min.dim: (1, 1, None), aten.median.dim: (1, 1, None),
    aten.mode.default: (1, 1, -1), aten.sort.default: (1, 1, -1), aten.topk.default: (1, 2, -1),
    aten.kthvalue.default: (1, 2, -1), aten.cummax.default: (1, 1, None), aten.cummin.default: (1, 1, None),
}  # fmt: skip
# They return positions in a plane of their input: how many of its last dimensions make one.
POSITIONS_IN_PLANE: dict[object, int] = {
    aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2, aten.adaptive_max_pool3d.default: 3, aten.fractional_max_pool2d.default: 2,
}  # fmt: skip
# They take positions along a dimension of their first argument, and fail where these lie outside: where the dimension
# and the positions are among their arguments.
TAKES_POSITIONS: dict[object, tuple[int | None, int]] = {
    aten.index_select.default: (1, 2), aten.gather.default: (1, 2), aten.scatter.src: (1, 2),
    aten.scatter_add.default: (1, 2), aten.scatter_reduce.two: (1, 2), aten.index_add.default: (1, 2),
    aten.embedding.default: (None, 1),
}  # fmt: skip
# The same, for a list of positions, of which negative ones count from the end.
TAKES_WRAPPING: Table = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor, aten._unsafe_index_put.default}
)
# Namespaces of operators that PyTorch itself brings, and operators of others whose code was read (`transformers`:
# matrix products of groups of rows, and their derivatives). Others may do anything.
KNOWN_NAMESPACES = frozenset(
    {"aten", "prims", "gact_fx", "inductor", "rngprims", "_c10d_functional", "_c10d_functional_autograd",
     "c10d_functional", "fsdp"}
)  # fmt: skip
KNOWN = frozenset({"transformers.grouped_mm_fallback.default", "transformers.grouped_mm_fallback_backward.default"})

# Operators of PyTorch that Inductor does not generate loops for: libraries have them, or eager PyTorch.
LIBRARY = frozenset({
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten.mv, aten.dot,
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward,
    aten.sort, aten.topk, aten.cumsum, aten.index_put, aten.index_put_, aten._unsafe_index_put, aten.scatter_add,
    aten.scatter_reduce, aten.index_add, aten.scatter, aten._unsafe_masked_index_put_accumulate,
    aten.max_pool2d_with_indices_backward, aten._ctc_loss, aten._ctc_loss_backward, aten._fft_r2c, aten._fft_c2c,
    aten._fft_c2r, aten.nonzero,
})  # fmt: skip
