"""``gact_fx::convolution_gradient``: the gradient of a convolution with respect to what it reads, without reading that.

The gradient of a convolution is a transposed convolution, and the other way round (Dumoulin and Visin, "A guide to
convolution arithmetic for deep learning", 2016, chapter 4). ``aten.convolution_backward`` computes the same, but
wants the input of the convolution, if only for its sizes. Inductor would choose memory formats for
``aten.convolution``, and never for an operator that it does not know.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("gact_fx", "FRAGMENT")
_library.define(
    "convolution_gradient(Tensor gradient, Tensor weight, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "bool transposed, SymInt[] output_padding, SymInt groups, bool channels_last) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)


def convolution_gradient(
    gradient: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    channels_last: bool,
) -> Tensor:
    """The gradient with respect to the input of a convolution, where ``gradient`` is that of its result.

    ``stride``, ``padding``, ``dilation``, ``transposed`` and ``groups`` are those of the convolution.
    ``output_padding``: by how much the input was longer, in each dimension, than the shortest one with such a result;
    not read where the convolution is a transposed one. ``channels_last``: the memory format to compute in.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if channels_last else {}
    memory_format = formats.get(gradient.dim(), torch.contiguous_format)
    gradient, weight = (x.contiguous(memory_format=memory_format) for x in (gradient, weight))
    longer = [0] * len(stride) if transposed else list(output_padding)
    found: Tensor = torch.ops.aten.convolution(
        gradient, weight, None, stride, padding, dilation, not transposed, longer, groups
    )
    return found


_library.impl("convolution_gradient", convolution_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("gact_fx::convolution_gradient", convolution_gradient, lib=_library)
