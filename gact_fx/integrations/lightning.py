"""A callback for Lightning (tried with 2.6), by either of its names, ``lightning`` and ``pytorch_lightning``."""

import logging
from typing import Any, cast

from torch import nn

from gact_fx.errors import UsageError
from gact_fx.integrations.compression import Compression
from gact_fx.plan import Plan

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]

log = logging.getLogger("gact_fx")
_WHO = "gact_fx.integrations.GactLightningCallback"
# Batches after which a module that was never called is not going to be.
BATCHES_WAITED = 2


class GactLightningCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Compiles the network when training begins, logs what that saves, and keeps the plan in the checkpoints.

        Trainer(callbacks=[GactLightningCallback(budget_bits=4)], ...)

    A module that is compiled already stays as it is. The plan is part of the callback's state in every checkpoint; a
    run that is resumed by ``fit(..., ckpt_path=...)`` goes on with it, as if it had not been interrupted. (Under
    ``profile_every``, steps are counted anew.)

    Figures, once for every plan, in the Trainer's loggers: ``gact_fx/bytes_before`` and ``gact_fx/bytes_after``, held
    for backward; ``gact_fx/noise``, the variance that compression adds to the gradient, as a share of what it varies by
    from batch to batch, where that is known (``gact_fx/noise_variance``, in units of squared gradient);
    ``gact_fx/plan_step``, the step in which the plan was made.

    Args:
        module: name of the module that ``training_step`` calls, as ``"network"``. Default: the LightningModule itself
            where its class has a ``forward``, or else the only module in it.
        options: those of :func:`gact_fx.compile`.

    Raises:
        ValueError: an option that does not exist, is out of range, or contradicts another one.
    """

    def __init__(self, *, module: str | None = None, **options: Any) -> None:
        super().__init__()
        self._module = module
        self._compression = Compression(_WHO, options)
        self._resumed: tuple[Plan | None, int] = (None, 0)
        self._batches = 0

    @property
    def state_key(self) -> str:
        """One for every module, so that several may be compiled."""
        return str(self._generate_state_key(module=self._module))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the checkpoint of an earlier run."""
        self._resumed = (None, 0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Compile the network, with the plan of the checkpoint that training is resumed from."""
        self._batches = 0
        self._compression.begin(self._network(pl_module), *self._resumed)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take note of a plan that was made, and log what is known of it."""
        self._batches += 1
        self._compression.follow(trainer.global_step)
        figures = self._compression.figures()
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step=trainer.global_step)
        if self._batches == BATCHES_WAITED and self._compression.never_ran:
            log.warning(
                "%s: training_step of %s has not called the module that was compiled (%s), so that nothing is "
                "compressed; give the name of the one that it calls as module=", _WHO, type(pl_module).__name__,
                self._module or "the default",
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The plan, as text, and the step in which it was made."""
        plan = self._compression.plan
        return {} if plan is None else {"plan": plan.to_json(), "plan_step": self._compression.plan_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave when training begins."""
        self._resumed = (Plan.from_json(state_dict["plan"], "the checkpoint"), state_dict["plan_step"])

    def _network(self, pl_module: Any) -> nn.Module:
        if self._module is not None:
            try:
                found: nn.Module = pl_module.get_submodule(self._module)
            except AttributeError as error:
                names = ", ".join(name for name, _ in pl_module.named_children())
                raise UsageError(
                    f"{_WHO}: {type(pl_module).__name__} has no module={self._module!r}; it has {names}"
                ) from error
            return found
        # Lightning's own forward calls nn.Module's, which there is none of.
        if type(pl_module).forward.__module__.split(".")[0] not in ("lightning", "pytorch_lightning", "torch"):
            return cast(nn.Module, pl_module)
        children = [
            (name, child) for name, child in pl_module.named_children() if any(True for _ in child.parameters())
        ]
        if len(children) != 1:
            names = ", ".join(name for name, _ in children) or "none"
            raise UsageError(
                f"{_WHO}: {type(pl_module).__name__} has no forward, and {len(children)} modules with parameters "
                f"({names}); give the name of the one that training_step calls as module="
            )
        return cast(nn.Module, children[0][1])
