"""Importing this module makes the backend ``"gact"`` known to accelerate, and with it to the Trainer of transformers:

    import gact_fx.accelerate
    TrainingArguments(..., torch_compile=True, torch_compile_backend="gact")

accelerate (tried with 1.15) has an enumeration of the backends that it takes, whatever else is registered with torch.
"""

from typing import Any

from accelerate.utils import DynamoBackend

_NAME = "GACT"


def _missing(cls: type[Any], value: object) -> Any:
    if value != _NAME:
        return None
    member = str.__new__(cls, _NAME)
    member._name_ = member._value_ = _NAME
    cls._value2member_map_[_NAME] = member
    return member


if _NAME not in [backend.value for backend in DynamoBackend]:
    # What Enum documents for values that have no member.
    DynamoBackend._missing_ = classmethod(_missing)
