"""The ways to save activation memory that `peers.py` compares: how each one is put upon a model.

Every method has a fresh process, so that it may set PyTorch's global options. torch.compile is part of a method
wherever people use the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hooks_compression import compress_saved_tensors
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gact_fx

aten = torch.ops.aten
Around = Callable[[], AbstractContextManager[Any]]  # what forward runs in
# The blocks that `real_networks.py`'s networks repeat.
LAYERS = ("BertLayer", "GPT2Block", "ResNetBottleNeckLayer", "Block")
# What selective checkpointing keeps: products, convolutions and fused attention.
KEPT = frozenset({
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
})  # fmt: skip


@dataclass(frozen=True)
class Method:
    """``prepare(model)`` puts the method upon a model, and may return what forward is to run in.

    ``steps_before`` are the training steps after which nothing compiles or measures any more; ``check``, if there is
    one, raises an error where the method had no effect.
    """

    label: str
    family: str
    prepare: Callable[[nn.Module], Around | None]
    steps_before: int = 1
    check: Callable[[], None] | None = None


def _eager(model: nn.Module) -> None:
    pass


def _compile(model: nn.Module) -> None:
    model.compile()


def _keep_products(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_layers(model: nn.Module, **options: Any) -> None:
    """Have every layer of the model compute its activations again in backward, but for what ``options`` keep."""
    configuration: Any = getattr(model, "config", None)
    if configuration is not None:
        configuration.use_cache = False  # layers that run twice would lengthen the cache twice
    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]
    if not layers:
        raise ValueError(f"no layer of {type(model).__name__} is one of {LAYERS}; add its class to LAYERS")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


def _checkpoint(model: nn.Module, selective: bool = False, compiled: bool = True) -> None:
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)}
    checkpoint_layers(model, **(contexts if selective else {}))
    if compiled:
        model.compile()


def _memory_budget(model: nn.Module, budget: float) -> None:
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = budget
    model.compile()


def _offload(model: nn.Module) -> Around:
    return partial(save_on_cpu, pin_memory=torch.cuda.is_available())


def _fp8(model: nn.Module) -> None:
    """Eight bits for every saved activation; left alone, the pass takes those in bfloat16 of at least 100 MB."""
    import torch._inductor.config

    dtypes = "torch.float32;torch.bfloat16;torch.float16"
    options = {"use_scaling": True, "size_in_mb": 0.0, "exclude_primals": True, "allowed_dtypes": dtypes}
    torch._inductor.config.post_grad_fusion_options = {"activation_quantization_aten_pass": options}
    model.compile()


def _check_fp8() -> None:
    from torch._dynamo.utils import counters

    if not counters["inductor"]["activation_quantization_bwd_aten_pass"]:
        raise RuntimeError("PyTorch's activation quantization pass changed no graph")


def _hooks(model: nn.Module, bits: int) -> Around:
    return partial(compress_saved_tensors, model, bits)


def _gact(model: nn.Module, bits: float, checkpointed: bool = False, recompute: str = "auto") -> None:
    if checkpointed:
        checkpoint_layers(model)
    gact_fx.compile(model, budget_bits=bits, recompute=recompute)


def _methods() -> dict[str, Method]:
    found = {
        "eager": Method("eager", "PyTorch", _eager),
        "compile": Method("torch.compile", "PyTorch", _compile),
        "checkpoint-eager": Method("checkpointing, eager", "recompute", partial(_checkpoint, compiled=False)),
        "checkpoint": Method("checkpointing", "recompute", _checkpoint),
        "selective": Method("selective checkpointing", "recompute", partial(_checkpoint, selective=True)),
    }
    for budget in (0.5, 0.0):
        label = f"memory budget {budget:g}"
        found[f"budget-{budget:g}"] = Method(label, "recompute", partial(_memory_budget, budget=budget))
    found["offload"] = Method("save_on_cpu", "offload", _offload)
    found["fp8"] = Method("fp8 pass", "quantize", _fp8, check=_check_fp8)
    for bits in (8, 4):
        found[f"hooks-{bits}"] = Method(f"hooks, {bits} bits", "hooks", partial(_hooks, bits=bits))
    for bits in (8, 4, 3, 2):
        # The first two steps are recorded and measured, the next one compiles what was planned.
        found[f"gact-{bits}"] = Method(f"gact_fx, {bits} bits", "gact_fx", partial(_gact, bits=bits), 3)
    label = "gact_fx, 4 bits, checkpointing"
    found["gact-4-checkpoint"] = Method(label, "gact_fx-more", partial(_gact, bits=4, checkpointed=True), 3)
    label = "gact_fx, 4 bits, recompute=full"
    found["gact-4-recompute"] = Method(label, "gact_fx-more", partial(_gact, bits=4, recompute="full"), 3)
    return found


METHODS = _methods()


def around(method: Method, model: nn.Module) -> Around:
    """Put ``method`` upon ``model``; returns what forward runs in."""
    return method.prepare(model) or nullcontext


def known(keys: Sequence[str]) -> list[str]:
    """``keys``, in the order of `METHODS`."""
    return [key for key in METHODS if key in keys]
