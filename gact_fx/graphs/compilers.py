"""The compilers that a rewritten pair of graphs goes to. Of all other modules, `mended_inductor`, `planned_order`,
`apart_kernels`, `realize_less` and `share_files` in `gact_fx.graphs` alone import Inductor.

Private, tried with torch 2.11 and 2.13 (in brackets, what public thing would replace it):

- ``torch._inductor.compile_fx`` with ``inner_compile``, ``compile_fx_inner``, ``CustomPartitionerFn``, and for
  ``inner="eager"`` ``torch._dynamo.backends.common.aot_autograd`` and ``_boxed_call`` (a partitioner and graph passes
  as options of ``torch.compile``); ``torch._functorch.config.enable_autograd_cache`` (a partitioner with a cache key);
- ``select_decomp_table`` and ``get_decompositions`` (for ``torch.export`` there is ``default_decompositions``);
- ``list_options`` and ``list_mode_options`` (the documentation of ``torch.compile`` refers to them);
- ``cpu_vec_isa.valid_vec_isa_list``, called early to fill its cache (nothing);
- ``cpp_builder.get_cpp_compiler`` and ``exc.InvalidCxxCompiler`` (a question to ``torch.compiler``);
- the output meta ``user_visible_output_idxs``, and ``GraphLowering.find_nodes_prefer_channels_last``, whose layout rule
  is written down again here (the strides that a saved tensor will have);
- ``torch._guards.TracingContext`` with ``fw_metadata.bw_donated_idxs``, tried with 2.13 alone (an option that leaves
  saved tensors as they are).
"""

import copy
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from gact_fx.graphs.apart_kernels import apart_kernels
from gact_fx.graphs.cache_key import sources_key
from gact_fx.graphs.in_blocks import in_blocks
from gact_fx.graphs.in_place import InPlaceInterpreter
from gact_fx.graphs.mended_inductor import mended_inductor
from gact_fx.graphs.planned_order import in_planned_order
from gact_fx.graphs.realize_less import realizing_less
from gact_fx.graphs.share_files import shared_files
from gact_fx.graphs.tensors import is_plain, is_view, storage_key

log = logging.getLogger("gact_fx")
Compiled = Callable[..., Any]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
# What runs instead of a compiled graph: (graph, is_backward, compile) -> a function of a list of inputs; ``compile()``
# gives what the inner compiler would.
Interpret = Callable[[fx.GraphModule, bool, Callable[[], Compiled]], Compiled]

aten = torch.ops.aten


def compile_pair(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Partition,
    *,
    inner: str,
    patches: Mapping[str, Any] | None = None,
    interpret: Interpret | None = None,
) -> Compiled:
    """Compile what Dynamo traced, with ``partition`` in place of PyTorch's partitioner.

    ``partition(joint, joint_inputs, **aot_options)`` returns the two graphs. ``inner`` is ``"inductor"`` or
    ``"eager"``; with ``interpret`` both graphs are traced for that compiler but run through ``interpret``. ``patches``
    are changes to Inductor's configuration. Equal graphs share what Inductor compiled, wherever they come from.
    """
    import torch._functorch.config as functorch_config

    # A hit in AOTAutograd's cache never calls the partitioner.
    with functorch_config.patch(enable_autograd_cache=False):
        if inner == "eager":
            return _compile_eager(module, example_inputs, partition, interpret)
        return _compile_inductor(module, example_inputs, partition, patches or {}, interpret)


def interpret_graph(graph: fx.GraphModule) -> Compiled:
    """Run a graph operator by operator, freeing, or writing over, every value after its last use."""
    interpreter = InPlaceInterpreter(graph)
    # A copy for each run: it goes on to hold the results (codes, gradients), and threads may run at the same time.
    return boxed(lambda arguments: copy.copy(interpreter).boxed_run(arguments))


def interpret_in_blocks(graph: fx.GraphModule) -> Compiled:
    """The same, made ready by the first run, with pointwise operators that follow one on another run block by block."""
    ready = functools.cache(lambda: interpret_graph(in_blocks(graph, interpret_graph)))
    return boxed(lambda arguments: ready()(arguments))


def without_views(run: Compiled, count: int) -> Compiled:
    """``run``, a forward graph, none of whose first ``count`` results is a view, as those of compiled code are none.

    Autograd lets nobody write in place to a result that came as a view. What shares memory with others is copied.
    """

    @boxed
    def call(arguments: list[Any]) -> Any:
        outputs = list(run(arguments))
        held = Counter(storage_key(x) for x in outputs if is_plain(x))
        for position, x in enumerate(outputs[:count]):
            if is_plain(x) and is_view(x):
                is_shared = held[storage_key(x)] > 1 or x.is_conj() or x.is_neg()
                # As old as what autograd makes of it, by which results are told when they come back.
                outputs[position] = x.clone() if is_shared else x.data
        return outputs

    return call


def boxed(run: Callable[[list[Any]], Any]) -> Compiled:
    """Mark ``run`` as what AOTAutograd calls with its arguments in one list, which the callee empties."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Inductor's decompositions, which it does not apply any more to what is put into partitioned graphs."""
    from torch._inductor.decomposition import select_decomp_table

    return cast(Mapping[Any, Callable[..., Any]], select_decomp_table())


def inductor_options() -> set[str]:
    """The names of Inductor's options."""
    from torch._inductor import list_options

    return set(list_options())


def inductor_mode(mode: str) -> dict[str, Any]:
    """The options that one of torch.compile's modes stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def _compile_eager(
    module: fx.GraphModule, example_inputs: Sequence[Any], partition: Partition, interpret: Interpret | None
) -> Compiled:
    from torch._decomp import get_decompositions
    from torch._dynamo.backends.common import aot_autograd

    # These compare, divide by or bend a saved argument inside one operator; as separate operators the passes see it.
    opaque = [
        aten.hardtanh, aten.leaky_relu, aten.hardsigmoid, aten.hardswish, aten._prelu_kernel, aten.elu, aten.hardshrink,
        aten.softshrink, aten.threshold,
        aten.threshold_backward, aten.hardtanh_backward, aten.leaky_relu_backward, aten.hardswish_backward,
        aten.hardsigmoid_backward, aten._prelu_kernel_backward, aten.elu_backward,
        aten._log_softmax_backward_data, aten.binary_cross_entropy_backward, aten.tanh_backward, aten.sigmoid_backward,
        aten.gelu_backward, aten.silu_backward, aten.mish_backward, aten.softplus_backward, aten.log_sigmoid_backward,
        aten.glu_backward, aten.huber_loss_backward, aten.smooth_l1_loss_backward, aten.hardshrink_backward,
        aten.softshrink_backward,
        # This one gives a result of the gradient's size, and coefficients are made of a gradient of one element.
        aten.native_dropout_backward,
        # And these read one for its shape alone.
        aten.nll_loss_backward, aten.nll_loss2d_backward,
    ]  # fmt: skip

    def compile_one(graph: fx.GraphModule, is_backward: bool) -> Compiled:
        _keep_saved_tensors()
        if interpret is None:
            return interpret_graph(graph)
        return interpret(graph, is_backward, lambda: interpret_graph(graph))

    backend = aot_autograd(
        fw_compiler=lambda graph, _: compile_one(graph, False),
        bw_compiler=lambda graph, _: compile_one(graph, True),
        inference_compiler=lambda graph, _: interpret_graph(graph),
        partition_fn=partition,
        decompositions={**get_decompositions(opaque), aten.zeros_like.default: _zeros_like},
        # Otherwise what was written under no_grad is copied to the input with a gradient, which replaces its history.
        keep_inference_input_mutations=True,
    )
    return backend(module, example_inputs)


def _zeros_like(x: torch.Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Without ``x``, of which ``zeros_like`` reads the shape, so that it would be saved."""
    if not x.is_contiguous() or options.get("memory_format") not in (None, torch.preserve_format):
        return NotImplemented
    return torch.zeros(x.shape, dtype=dtype or x.dtype, device=options.get("device") or x.device)


def _compile_inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: Partition,
    patches: Mapping[str, Any],
    interpret: Interpret | None,
) -> Compiled:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    partitioner = _partitioner(partition)

    def compile_one(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        def lower() -> Compiled:
            partitioner.laid_out = str(graph.graph.output_node().meta.get("user_visible_output_idxs"))
            with mended_inductor(), in_planned_order(), apart_kernels(), realizing_less(), shared_files():
                return cast(Compiled, compile_fx_inner(graph, inputs, **options))

        if options.get("is_inference"):
            return lower()
        _keep_input_layouts(graph)
        _keep_saved_tensors()
        return lower() if interpret is None else interpret(graph, bool(options.get("is_backward")), lower)

    on_cpu = (isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.dim() > 0 for x in example_inputs)
    if interpret is not None and any(on_cpu):
        _find_instructions()
    # A buffer that is to be used again stays allocated in between, whatever else is live then.
    changes = {"allow_buffer_reuse": False, **patches, "custom_partitioner_fn": partitioner}
    return cast(Compiled, compile_fx(module, example_inputs, inner_compile=compile_one, config_patches=changes))


@functools.cache
def _find_instructions() -> None:
    """Have Inductor find out what vector instructions there are while profiling goes on.

    Where its cache is cold it calls the C++ compiler for that, once in a process, and waits for ten seconds or so.
    """
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    def find() -> None:
        try:
            valid_vec_isa_list()
        except Exception as error:
            # It tries again when it compiles, and fails there.
            log.debug("looking for vector instructions failed with %s: %s", type(error).__name__, error)

    threading.Thread(target=find, name="gact_fx: find vector instructions", daemon=True).start()


def _keep_input_layouts(graph: fx.GraphModule) -> None:
    """Return saved inputs as they are: Inductor would save a channels-last copy of every convolution's weight."""
    output = graph.graph.output_node()
    outputs, visible = output.args[0], output.meta.get("user_visible_output_idxs")
    if visible is not None and isinstance(outputs, (list, tuple)):
        saved_inputs = [i for i, n in enumerate(outputs) if isinstance(n, fx.Node) and n.op == "placeholder"]
        output.meta["user_visible_output_idxs"] = sorted({*visible, *saved_inputs})


def _keep_saved_tensors() -> None:
    """Have backward leave what was saved as it is, so that it can run twice (``retain_graph=True``).

    torch.compile has it overwrite saved tensors, unless its first run retains the graph, and refuses to retain it
    later. What is saved here are codes, whose memory is of little use.
    """
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    donated = getattr(metadata, "bw_donated_idxs", None)
    if donated:
        # The list itself, which is all that is shared with the check when backward runs.
        donated.clear()


def channels_last_nodes(forward: fx.GraphModule, inner: str) -> frozenset[str]:
    """Nodes that Inductor will lay out channels-last although the graph says contiguous.

    Only a matter of speed, but for fused attention: reading a tensor in an order that is not its memory's costs a copy,
    while attention's kernels would read wrong values. What these read is not to be laid out so (`decide_eligibility`).
    """
    if inner != "inductor":
        return frozenset()
    chosen: set[fx.Node] = set()
    for node in reversed(forward.graph.nodes):
        if node.target is aten.bmm.default or node.op == "output":
            continue
        if node.target is aten.convolution.default or any(user in chosen for user in node.users):
            chosen.add(node)
    return frozenset(n.name for n in chosen if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].dim() == 4)


def cpp_compiler() -> str:
    """The C++ compiler that Inductor would call, '' where it finds none that runs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except (InvalidCxxCompiler, OSError):
        return ""


def _partitioner(partition: Partition) -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):  # type: ignore[misc, unused-ignore]
        """``laid_out``: which results of the graph that is compiled next keep their strides."""

        laid_out = ""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
            return partition(gm, joint_inputs, **options)

        def uuid(self) -> str:
            # Inductor finds compiled graphs again by what they compute and by this key. Neither those strides nor
            # whether backward overwrites saved tensors nor how we compile is in its own.
            return f"gact_fx {sources_key()} keeps saved tensors, and the strides of {self.laid_out}"

        def __reduce__(self) -> tuple[Any, ...]:
            # Inductor pickles its configuration for its cache keys.
            return str, (self.uuid(),)

    return Partitioner()
