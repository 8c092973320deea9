"""What runs in eager PyTorch between compiled graphs: what it saves for backward is stored in codes, too.

Saved-tensor hooks see a tensor when it is saved, but not what for. That is read from autograd's nodes when the model
has returned; from then on the same place in the program (its call stack, how often it has saved already, dtype and
producer) is stored as the nodes there allow. What the first pass through a place saved is stored so afterwards.

Private, tried with torch 2.11 and 2.13: ``torch._C._autograd._top_saved_tensors_default_hooks``, which tells whether
other hooks are active, and ``_saved_tensors_hooks_get_disabled_error_message``, which tells whether there may be any;
PyTorch's own ``disable_saved_tensors_hooks`` asks it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from gact_fx.autograd_nodes import Treatment, Use, nodes_of, saved_by, treatment
from gact_fx.codec_layout import SOURCE_DTYPES
from gact_fx.dynamo import is_forced_eager
from gact_fx.plan import slot_seed
from gact_fx.saved_tensors import Packed, is_expanded, pack_in

log = logging.getLogger("gact_fx")
# Forward passes without a backward pass that are counted as one step: validation with gradients has no end.
_MAX_CALLS = 64
# What is mostly at its minimum loses less by stochastic rounding (design, section 4).
_SPARSE = ("ReluBackward0", "SoftmaxBackward0", "NativeDropoutBackward0", "ThresholdBackward0")
# Of the error with which torch.func's transforms refuse to run beneath saved-tensor hooks.
_REFUSAL = "support saved tensor hooks"
# What makes of a parameter what is as large, and the same in every step but for the parameter's own change.
_COPIES = (
    "ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0",
    "CloneBackward0", "ExpandBackward0", "AliasBackward0",
)  # fmt: skip


@dataclass(frozen=True)
class EagerTensor:
    """One tensor that eager PyTorch saved in the latest step of training.

    ``bits`` is None where it is kept exact, ``rounding`` where its code is. Bytes count each storage and code once.
    """

    use: Use | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int | None
    rounding: str | None
    bytes_before: int
    bytes_after: int


class _Held:
    """What the hook put in a saved tensor's place: the tensor itself, or codes from which it is made again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a node that saves its own result would otherwise hold itself, for ever if backward never runs.
        self.value: torch.Tensor | Packed = tensor.detach()
        self.producer = _producer(tensor)
        self.requires_grad = tensor.requires_grad
        self.place: Hashable = None
        self.treatment = Treatment.EXACT
        self.scale: torch.Tensor | None = None
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.version = tensor._version

    def is_modified(self) -> bool:
        """Whether the tensor was written to after it was saved."""
        return isinstance(self.value, torch.Tensor) and self.value._version != self.version

    def read(self) -> torch.Tensor:
        if not isinstance(self.value, Packed):
            if self.is_modified():
                # PyTorch's own check does not see through hooks.
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {tuple(self.value.shape)} tensor is at version {self.value._version}, expected {self.version}; "
                    "change it after backward, or a clone of it"
                )
            return self.value
        found = self.value.unpack()
        if self.scale is not None:
            return found * self.scale
        if self.treatment is Treatment.SIGN:
            return found.to(self.dtype)
        return found.log_() if self.treatment is Treatment.EXPONENTIAL else found


class EagerRegions:
    """The hooks of one compiled model.

    Args:
        bits: width of a code.
        seed: of the noise.
        min_elements: smaller tensors stay as they are.
        owned: gives the tensors that are there anyway, parameters and buffers.
    """

    def __init__(
        self, bits: int, seed: int, min_elements: int, owned: Callable[[], Iterable[torch.Tensor]] = lambda: ()
    ) -> None:
        self._bits = bits
        self._seed = seed
        self._min_elements = min_elements
        self._owned = owned
        self._uses: dict[Hashable, Use] = {}
        # Keeps alive the code objects whose addresses are part of places.
        self._code_objects: dict[int, CodeType] = {}
        self._call: _Call | None = None
        self._is_off = False
        # Called from frames that Dynamo watches, which must not compile it.
        self._pack_hook = torch.compiler.disable(self._pack)
        self._pack_hook.regions = self
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack_hook, self._read)
        # Shape and dtype of what several graphs of one forward pass save.
        self._shared: set[tuple[torch.Size, torch.dtype]] = set()
        # Of all forward passes since the last backward pass.
        self.latest: tuple[EagerTensor, ...] = ()
        self._calls = 0
        self._has_read = False

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` with hooks for what runs between its graphs, unless the caller has hooks or asked for eager."""

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_off or not torch.is_grad_enabled() or self._call is not None or torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            if _top_hooks() or _hooks_are_forbidden() or is_forced_eager():
                return compiled(*args, **kwargs)
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self._call = current = _Call(id(sys._getframe()), inputs, self._owned)
            try:
                with self._hooks:
                    result = compiled(*args, **kwargs)
            except RuntimeError as error:
                if _REFUSAL not in str(error):
                    raise
                self._is_off, self.latest = True, ()
                log.warning(
                    "torch.func runs in eager PyTorch between compiled graphs, and admits no saved-tensor hooks: what "
                    "is saved there stays exact from now on; this forward pass was begun twice"
                )
            finally:
                self._call = None
            if self._is_off:
                return compiled(*args, **kwargs)
            if current.saved:
                self._settle(current, result)
            return result

        return call

    def is_intermediate(self, x: torch.Tensor) -> bool:
        """Whether a graph's input was made by eager PyTorch in this forward pass, and no other graph saves it.

        Such a tensor (an edge index with self-loops, say) is held by the graph alone that saves it.
        """
        if self._call is None or type(x) is not torch.Tensor or x.layout is not torch.strided:
            return False
        return not self._call.is_owned(x) and (x.shape, x.dtype) not in self._shared

    def watch_inputs(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, a compiled graph, noting which of its inputs other graphs save, too."""

        @functools.wraps(run)
        def call(*arguments: Any) -> Any:
            call, inputs = self._call, [x for x in arguments if isinstance(x, torch.Tensor)]
            read = {x.untyped_storage()._cdata: x for x in inputs if not x.requires_grad and self.is_intermediate(x)}
            result = run(*arguments)
            # A graph without a backward pass saves nothing.
            if call is not None and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(result)):
                for storage, x in read.items():
                    known = call.graph_inputs.get(storage)
                    if known is not None and not known.expired():
                        self._shared.add((x.shape, x.dtype))
                    call.graph_inputs[storage] = StorageWeakRef(x.untyped_storage())
            return result

        return call

    def _pack(self, x: torch.Tensor) -> _Held:
        held = _Held(x)
        call = self._call
        if call is None or type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
            return held
        if call.is_owned(x):
            return held
        call.saved.append((held, call.number_of_storage(x)))
        if x.dtype in (*SOURCE_DTYPES, torch.bool) and x.numel() >= self._min_elements:
            held.place = self._place(x, call)
            use = self._uses.get(held.place)
            if use is not None:
                self._store(held, use, call)
        return held

    def _read(self, held: _Held) -> torch.Tensor:
        self._has_read = True
        return held.read()

    def _place(self, x: torch.Tensor, call: _Call) -> Hashable:
        """Identifies what saves ``x``, in this forward pass as in the next ones."""
        stack: list[int] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(frame) != call.frame:
            self._code_objects[id(frame.f_code)] = frame.f_code
            stack += id(frame.f_code), frame.f_lasti
            frame = frame.f_back
        where = tuple(stack)
        call.visits[where] += 1
        return where, call.visits[where], x.dtype, _producer(x)

    def _store(self, held: _Held, use: Use, call: _Call) -> None:
        """Put codes in the place of a tensor, as ``use`` allows."""
        x = held.value
        assert isinstance(x, torch.Tensor)
        # What was written to meanwhile is an error in backward, as without hooks.
        if use.treatment is Treatment.EXACT or is_expanded(x) or held.is_modified():
            return
        held.treatment = use.treatment
        if use.node == "MulBackward0" and not held.requires_grad:
            held.scale = _scale_of_mask(x)
        is_mask = held.scale is not None
        key = (use.treatment, is_mask, x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
        storage, known = call.codes.get(key, (None, None))
        code = known() if known is not None and storage is not None and not storage.expired() else None
        if code is None:
            seed = slot_seed(self._seed, "eager", str(len(call.codes)))
            rounding = "stochastic" if held.producer in _SPARSE else "dither"
            if is_mask:
                code = pack_in(x != 0, 1, seed)
            elif use.treatment is Treatment.SIGN:
                code = pack_in(~(x <= 0), 1, seed)
            elif use.treatment is Treatment.EXPONENTIAL:
                code = pack_in(x.exp(), self._bits, seed)
            else:
                code = pack_in(x, self._bits, seed, rounding)
            call.codes[key] = StorageWeakRef(x.untyped_storage()), weakref.ref(code)
        held.value = code

    def _settle(self, call: _Call, result: Any) -> None:
        """Learn what saved the tensors of places that were new, store these tensors, and see to it that what saved the
        others is what is known.
        """
        waiting = sum(held.place is not None for held, _ in call.saved)
        nodes = nodes_of(result, call.inputs) if waiting else iter(())
        for node in nodes:
            for attribute, held in saved_by(node):
                if not isinstance(held, _Held) or held.place is None:
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
        if self._has_read or self._calls == _MAX_CALLS:
            self._has_read, self._calls, self.latest = False, 0, ()
        self._calls += 1
        self.latest += tuple(self._records(call))

    def _check(self, held: _Held, use: Use, found: Use) -> None:
        """Keep exact from now on what has been stored for another use than it has."""
        if use.treatment in (found.treatment, Treatment.EXACT):
            return
        self._uses[held.place] = replace(found, treatment=Treatment.EXACT)
        log.warning(
            "eager PyTorch ran %s where it used to run %s: what it saves there has been rounded in this step, and is "
            "kept exact from the next one on", found, use,
        )  # fmt: skip

    def _records(self, call: _Call) -> Iterator[EagerTensor]:
        before: set[int] = set()
        after: set[int] = set()
        for held, storage in call.saved:
            code = held.value
            nbytes = 0 if storage in before else call.sizes[storage]
            before.add(storage)
            # Codes are told apart by their identity, storages by their number.
            key = id(code) if isinstance(code, Packed) else storage
            is_new = key not in after
            after.add(key)
            use = self._uses.get(held.place) if held.place is not None else None
            if isinstance(code, Packed):
                taken = code.blob.numel() if is_new else 0
                # A mask is exact.
                rounding = None if code.dtype is torch.bool else code.rounding
                yield EagerTensor(use, held.shape, held.dtype, code.bits, rounding, nbytes, taken)
            else:
                taken = call.sizes[storage] if is_new else 0
                yield EagerTensor(use, held.shape, held.dtype, None, None, nbytes, taken)


class _Call:
    """One forward pass: its outermost frame, by its id, and what was saved in it.

    The frame itself would refer to this object, and be freed with all that it holds only when Python collects cycles.
    """

    def __init__(self, frame: int, inputs: list[torch.Tensor], owned: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.frame = frame
        self.inputs = inputs
        self.visits: Counter[Hashable] = Counter()
        # With the number of the tensor's storage in ``sizes``, which are in bytes.
        self.saved: list[tuple[_Held, int]] = []
        self.codes: dict[Hashable, tuple[StorageWeakRef, weakref.ref[Packed]]] = {}
        self.graph_inputs: dict[int, StorageWeakRef] = {}
        self.sizes: list[int] = []
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._owned = owned

    @functools.cached_property
    def owned(self) -> frozenset[int]:
        """Storages that are there anyway: parameters, buffers and the batch."""
        plain = [x for x in (*self._owned(), *self.inputs) if x.layout is torch.strided]
        return frozenset(x.untyped_storage()._cdata for x in plain)

    def is_owned(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is a parameter, a buffer, part of the batch, or a parameter that was cast or laid out anew."""
        if x.untyped_storage()._cdata in self.owned:
            return True
        node = x.grad_fn
        while node is not None and node.name() in _COPIES:
            sources = [source for source, _ in node.next_functions if source is not None]
            if len(sources) != 1:
                return False
            node = sources[0]
            if hasattr(node, "variable"):
                return isinstance(node.variable, torch.nn.Parameter)
        return False

    def number_of_storage(self, x: torch.Tensor) -> int:
        """The position of the storage of ``x`` in ``sizes``; storages may take turns at one address."""
        storage = x.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is not None and not known[0].expired():
            return known[1]
        self._storages[storage._cdata] = StorageWeakRef(storage), len(self.sizes)
        self.sizes.append(storage.nbytes())
        return len(self.sizes) - 1


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within, no model's hooks are active: compiled graphs store what they save themselves."""
    hooks = _top_hooks()
    regions = getattr(hooks[0], "regions", None) if hooks else None
    if not isinstance(regions, EagerRegions):
        yield
        return
    regions._hooks.__exit__()
    try:
        yield
    finally:
        regions._hooks.__enter__()


def outside_hooks(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, with the hooks `paused` while it runs."""

    @functools.wraps(run)
    def call(*arguments: Any) -> Any:
        with paused():
            return run(*arguments)

    return call


def _top_hooks() -> Any:
    """The innermost saved-tensor hooks, None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _hooks_are_forbidden() -> bool:
    """Whether hooks cannot be set, as within ``torch.func.grad``."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def _scale_of_mask(x: torch.Tensor) -> torch.Tensor | None:
    """The one value beside 0 in ``x``, None if there are several: dropout multiplies by such a mask."""
    if x.dtype is torch.bool or not x.numel():
        return None
    scale = x.max()
    return scale if torch.equal(x, (x != 0) * scale) else None


def _producer(x: torch.Tensor) -> str:
    return x.grad_fn.name() if x.grad_fn is not None else ""
