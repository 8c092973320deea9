"""What runs in eager PyTorch between compiled graphs: what it saves for backward is stored in codes, too.

Saved-tensor hooks see a tensor when it is saved, but not what for. That is read from autograd's nodes when the model
has returned; from then on the same place in the program (its call stack, how often it has saved already, dtype and
producer) is stored as the nodes there allow. What the first pass through a place saved is stored so afterwards.
"""

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from gact_fx.breaks.autograd_nodes import Treatment, Use, nodes_of, treatment
from gact_fx.breaks.forward_pass import EagerTensor, ForwardPass, Held, Reads, producer_of
from gact_fx.breaks.graph_holdings import GraphHoldings, Holding
from gact_fx.codec.code import MASK_CODE, Code
from gact_fx.codec.layout import SOURCE_DTYPES
from gact_fx.codec.packed_tensors import Packed, is_expanded, pack_in, scale_of_mask
from gact_fx.graphs.autograd_graph import saved_by
from gact_fx.graphs.dynamo import is_forced_eager
from gact_fx.graphs.hooks import allow_hooks, hooks_are_forbidden, refuses_hooks, top_hooks
from gact_fx.graphs.tensors import StorageWeakRef, address, is_fake, is_plain, storage_key, version
from gact_fx.graphs.trees import tree_leaves
from gact_fx.plan import tensor_seed

log = logging.getLogger("gact_fx")
# Forward passes without a backward pass that are counted as one step: validation with gradients has no end.
_MAX_CALLS = 64
# What is mostly at its minimum loses less by stochastic rounding (design, section 4).
_SPARSE = ("ReluBackward0", "SoftmaxBackward0", "NativeDropoutBackward0", "ThresholdBackward0")


class EagerRegions:
    """The hooks of one compiled model: codes of ``bits`` bits, with noise by ``seed``.

    Tensors of fewer than ``min_elements`` stay as they are, and so do those that ``owned`` gives, which are there
    anyway: parameters and buffers.
    """

    def __init__(
        self, bits: int, seed: int, min_elements: int, owned: Callable[[], Iterable[torch.Tensor]] = lambda: ()
    ) -> None:
        self.bits = bits
        self._seed = seed
        self._min_elements = min_elements
        self._owned = owned
        self._uses: dict[Hashable, Use] = {}
        # Numbers of call stacks, which take long to hash.
        self._stacks: dict[tuple[tuple[str, int, str, int], ...], int] = {}
        # The present forward pass, and its outermost frame, which refers to it: the pass must not refer back.
        self._call: ForwardPass | None = None
        self._frame: FrameType | None = None
        self._is_off = False
        # Called from frames that Dynamo watches, which must not compile it.
        self._pack_hook = torch.compiler.disable(self._pack)
        self._pack_hook.pause = self._pause
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack_hook, self._read)
        # Of graphs' activations, in which share of the runs each was the first to be held, and to be stored.
        self.shares_of_runs: dict[Holding, tuple[float, float]] = {}
        # Shape and dtype of what several graphs of one forward pass save.
        self._shared: set[tuple[torch.Size, torch.dtype]] = set()
        # The forward passes of the latest step, and of the latest that was not profiled.
        self._passes: list[tuple[Reads, tuple[EagerTensor, ...]]] = []
        self._planned_passes = self._passes
        self._has_read = False
        self._is_paused = False
        # Whether all stays exact, and what changes the noise of codes.
        self.is_exact, self.noise = False, 0

    def twin(self) -> "EagerRegions":
        """Hooks for the same model, compiled anew into the same graphs; they have seen no forward pass."""
        found = EagerRegions(self.bits, self._seed, self._min_elements, self._owned)
        found._shared, found._is_off = set(self._shared), self._is_off
        return found

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` with hooks for what runs between its graphs, unless the caller has hooks or asked for eager."""

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_off or not torch.is_grad_enabled() or self._call is not None or torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            if top_hooks() or hooks_are_forbidden() or is_forced_eager():
                return compiled(*args, **kwargs)
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self._call = current = ForwardPass(inputs, self._owned)
            self._frame = sys._getframe()
            try:
                with self._hooks:
                    result = compiled(*args, **kwargs)
            except RuntimeError as error:
                if not refuses_hooks(error):
                    raise
                # There was no ban when the call began.
                allow_hooks()
                self._is_off, self._passes, self._planned_passes = True, [], []
                log.warning(
                    "torch.func admits no saved-tensor hooks: what eager PyTorch saves between compiled graphs stays "
                    "exact from now on; this forward pass was begun twice. "
                    'TORCH_LOGS="graph_breaks" names lines that stay out of the graphs, if any do'
                )
            finally:
                self._call = self._frame = None
            if self._is_off:
                return compiled(*args, **kwargs)
            self.shares_of_runs.update(current.graphs.shares_of_runs())
            if current.saved:
                self._settle(current, result)
            return result

        return call

    @property
    def latest(self) -> tuple[EagerTensor, ...]:
        """What eager PyTorch saved in the latest step, in the forward passes that ran backward if any did."""
        return _saved_in(self._passes)

    @property
    def latest_planned(self) -> tuple[EagerTensor, ...]:
        """The same, of the latest step whose graphs ran a plan if any did."""
        return _saved_in(self._planned_passes or self._passes)

    def holdings(self) -> GraphHoldings | None:
        """What the graphs of the present forward pass, which runs a plan, hold."""
        if self._call is None:
            return None
        self._call.runs_plan = True
        return self._call.graphs

    def is_intermediate(self, x: torch.Tensor) -> bool:
        """Whether an earlier graph of this forward pass made ``x`` (an edge index with self-loops, say), and no other
        graph saves it. Of what eager PyTorch made, nobody knows whether somebody holds it.
        """
        if self._call is None or not is_plain(x):
            return False
        made = self._call.made.get(storage_key(x))
        return made is not None and not made.expired() and (x.shape, x.dtype) not in self._shared

    def watch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, a compiled graph, noting what it makes without a gradient, and which of that other graphs save."""

        @functools.wraps(run)
        def call(*arguments: Any) -> Any:
            call = self._call
            result = run(*arguments)
            if call is None:
                return result
            inputs = {storage_key(x): x for x in arguments if is_plain(x) and not x.requires_grad}
            outputs = [x for x in tree_leaves(result) if is_plain(x)]
            # A graph without a backward pass saves nothing.
            if any(x.requires_grad for x in outputs):
                for storage, x in inputs.items():
                    if storage in call.read_by_graphs and self.is_intermediate(x):
                        self._shared.add((x.shape, x.dtype))
                    call.read_by_graphs.add(storage)
            for x in outputs:
                if not x.requires_grad and storage_key(x) not in inputs:
                    call.made[storage_key(x)] = StorageWeakRef(x.untyped_storage())
            return result

        return call

    def _pack(self, x: torch.Tensor) -> Held:
        held = Held(x)
        call = self._call
        is_one = type(x) in (torch.Tensor, torch.nn.Parameter) or is_fake(x)
        is_dense = is_one and x.layout is torch.strided
        if call is None or not is_dense or call.is_owned(x):
            return held
        held.reads, held.storage = call.reads, call.storages.number(x)
        call.saved.append(held)
        if x.dtype in (*SOURCE_DTYPES, torch.bool) and x.numel() >= self._min_elements:
            held.place = self._place(x, call)
            use = self._uses.get(held.place)
            if use is not None:
                self._store(held, use, call)
        return held

    def _read(self, held: Held) -> torch.Tensor:
        # What profiling reads meanwhile is no backward pass of training.
        if not self._is_paused:
            self._has_read = True
            if held.reads is not None:
                held.reads.any = True
        return held.read()

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        self._hooks.__exit__()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._hooks.__enter__()

    def _place(self, x: torch.Tensor, call: ForwardPass) -> Hashable:
        """Identifies what saves ``x``, in this forward pass as in the next ones."""
        stack = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            code = frame.f_code
            # Not the code itself: what Dynamo writes may have constants that cannot be hashed.
            stack.append((code.co_filename, code.co_firstlineno, code.co_name, frame.f_lasti))
            frame = frame.f_back
        where = self._stacks.setdefault(tuple(stack), len(self._stacks))
        call.visits[where] += 1
        return where, call.visits[where], x.dtype, producer_of(x)

    def _store(self, held: Held, use: Use, call: ForwardPass) -> None:
        """Put codes in the place of a tensor, as ``use`` allows."""
        x = held.value
        assert isinstance(x, torch.Tensor)
        # What was written to meanwhile is an error in backward, as without hooks.
        if self.is_exact or use.treatment is Treatment.EXACT or is_expanded(x) or held.is_modified():
            return
        held.treatment = use.treatment
        # The values of a fake tensor say nothing.
        if use.node == "MulBackward0" and not held.requires_grad and not is_fake(x):
            held.scale = scale_of_mask(x)
        is_mask = held.scale is not None
        key = (use.treatment, is_mask, address(x), x.shape, x.stride(), x.dtype, x.is_neg(), version(x))
        storage, known = call.codes.get(key, (None, None))
        code = known() if known is not None and storage is not None and not storage.expired() else None
        if code is None:
            seed = tensor_seed(self._seed, "eager", str(len(call.codes))) ^ self.noise
            rounding = "stochastic" if held.producer in _SPARSE else "dither"
            if is_mask:
                code = pack_in(x != 0, MASK_CODE)
            elif use.treatment is Treatment.SIGN:
                code = pack_in(~(x <= 0), MASK_CODE)
            elif use.treatment is Treatment.EXPONENTIAL:
                code = pack_in(x.exp(), Code(self.bits, seed=seed))
            else:
                code = pack_in(x, Code(self.bits, rounding, seed=seed))
            call.codes[key] = StorageWeakRef(x.untyped_storage()), weakref.ref(code)
        held.value = code

    def _settle(self, call: ForwardPass, result: Any) -> None:
        """Learn what saved the tensors of new places, store these tensors, and check what is known of the others."""
        waiting = sum(held.place is not None for held in call.saved)
        nodes = nodes_of(result, call.inputs) if waiting else iter(())
        for node in nodes:
            for attribute, held in saved_by(node):
                if not isinstance(held, Held) or held.place is None:
                    continue
                found = Use(node.name(), attribute, treatment(node, attribute, held.dtype))
                use = self._uses.setdefault(held.place, found)
                if isinstance(held.value, Packed):
                    self._check(held, use, found)
                else:
                    self._store(held, use if use == found else replace(found, treatment=Treatment.EXACT), call)
                waiting -= 1
            if not waiting:
                break
        if self._has_read or len(self._passes) == _MAX_CALLS:
            self._has_read, self._passes = False, []
        self._passes.append((call.reads, tuple(call.eager_tensors(self._uses))))
        if call.runs_plan:
            self._planned_passes = self._passes

    def _check(self, held: Held, use: Use, found: Use) -> None:
        """Keep exact from now on what has been stored for another use than it has."""
        if use.treatment in (found.treatment, Treatment.EXACT):
            return
        self._uses[held.place] = replace(found, treatment=Treatment.EXACT)
        log.warning(
            "eager PyTorch ran %s where it used to run %s: what it saves there has been rounded in this step, and is "
            "kept exact from the next one on", found, use,
        )  # fmt: skip


def _saved_in(passes: list[tuple[Reads, tuple[EagerTensor, ...]]]) -> tuple[EagerTensor, ...]:
    read = [saved for reads, saved in passes if reads.any] or [saved for _, saved in passes]
    return tuple(tensor for saved in read for tensor in saved)
