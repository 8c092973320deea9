"""The operators that move codes to host memory and back: ``gact_fx::to_host``, ``fetch`` and ``arrive``.

On a GPU the copies run on a stream of their own, beside the computation: ``to_host`` and ``fetch`` only start them.
What ``fetch`` returns may be read once ``arrive`` had the present stream wait for it; to compilers, which know no
streams, ``arrive`` writes it: an output that shares memory with an input would not be functional, and a copy would cost
time. On other devices all copies are done at once.

On a GPU small networks have trained with these operators (`tests/passes/test_swap_codes.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

# Copies that were started and not waited for: by address, the event of their end and the tensor, whose memory must not
# be given away before, whatever happens to the backward pass that asked for it.
_in_flight: dict[int, tuple[torch.cuda.Event, torch.Tensor]] = {}


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned where ``x`` is on a GPU."""
    if x.device.type != "cuda":
        return x.to("cpu", copy=True)
    side = _side_stream(x.device)
    # Compilers reuse the memory of ``x`` behind the allocator's back as soon as nobody reads it any more.
    held = x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        host.copy_(held, non_blocking=True)
    held.record_stream(side)
    return host


def _fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device``, on its way; in the memory of the present stream, which frees it in its own order."""
    if device.type != "cuda":
        return host.to(device, copy=True)
    for address, (event, _) in list(_in_flight.items()):
        # Of a backward pass that was broken off, or done before it was asked for.
        if event.query():
            _in_flight.pop(address, None)
    x = torch.empty(host.shape, dtype=host.dtype, device=device)
    side = _side_stream(x.device)
    # What had this memory before may still be read.
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        x.copy_(host, non_blocking=True)
        _in_flight[x.data_ptr()] = (side.record_event(), x)
    return x


def _arrive(x: torch.Tensor) -> None:
    """Have the present stream wait for what `_fetch` started."""
    event, _ = _in_flight.pop(x.data_ptr(), (None, None))
    if event is not None:
        torch.cuda.current_stream(x.device).wait_event(event)


_OPERATORS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("to_host(Tensor x) -> Tensor", _to_host, lambda x: x.new_empty(x.shape, device="cpu")),
    ("fetch(Tensor host, Device device) -> Tensor", _fetch, lambda x, device: x.new_empty(x.shape, device=device)),
    ("arrive(Tensor(a!) x) -> ()", _arrive, lambda x: None),
)
_library = torch.library.Library("gact_fx", "FRAGMENT")
for _schema, _implementation, _fake in _OPERATORS:
    _name = _schema.split("(")[0]
    _library.define(_schema, tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag))
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gact_fx::{_name}", _fake, lib=_library)
