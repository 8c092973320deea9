"""Callbacks for the training loops of other libraries, which are imported when the callbacks are.

from gact_fx.integrations import GactTrainerCallback    # Hugging Face's Trainer
from gact_fx.integrations import GactLightningCallback  # Lightning
"""

import importlib
from typing import TYPE_CHECKING, Any

from gact_fx.errors import MissingPackageError

if TYPE_CHECKING:
    from gact_fx.integrations.hugging_face import GactTrainerCallback as GactTrainerCallback
    from gact_fx.integrations.lightning import GactLightningCallback as GactLightningCallback

__all__ = ["GactLightningCallback", "GactTrainerCallback"]
# Where each is, and the extra that installs what it needs.
_HOMES = {
    "GactTrainerCallback": ("gact_fx.integrations.hugging_face", "transformers"),
    "GactLightningCallback": ("gact_fx.integrations.lightning", "lightning"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _HOMES[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"gact_fx.integrations.{name} needs {extra}, and {error.name} is not installed; "
            f"pip install 'gact-fx[{extra}]'"
        ) from error
