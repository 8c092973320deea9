"""The models that ``python -m gact_fx estimate`` names: configurations of transformers, and functions of the user's."""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gact_fx.errors import MissingPackageError, UsageError, first_line
from gact_fx.graphs.fake_steps import Fakes, needs_values

_WHO = "python -m gact_fx estimate"
# By the first of these that knows the configuration, the model is built; all of them have a loss.
HEADS = (
    "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
)  # fmt: skip


def named_function(name: str) -> tuple[Any, ...]:
    """What the function returns that "module:function" names: a model and a batch, and a loss function or none.

    Raises:
        UsageError: there is no such function, or it returns something else.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{_WHO}: {name!r} cannot be called: {first_line(error)}") from error
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[0], nn.Module):
        raise UsageError(
            f"{_WHO}: {name} must return (model, batch) or (model, batch, loss_fn), got {type(found).__name__}"
        )
    return found


class NamedConfiguration:
    """A model of transformers with random weights, by its configuration's class, and batches for it.

    ``settings`` are texts by the names of the configuration's fields; ``length`` is that of texts, in tokens.

    Raises:
        MissingPackageError: transformers is not installed.
        UsageError: there is no such class, field or head.
    """

    def __init__(self, name: str, settings: Mapping[str, str], rows: int, length: int) -> None:
        try:
            import transformers
        except ImportError as error:
            raise MissingPackageError(
                f"{_WHO}: {name} is a configuration of transformers, which is not installed; "
                "pip install 'gact_fx[transformers]'"
            ) from error
        kind = getattr(transformers, name, None)
        if not (inspect.isclass(kind) and issubclass(kind, transformers.PretrainedConfig)):
            raise UsageError(
                f"{_WHO}: transformers has no configuration class {name!r}; give one as BertConfig, or module:function"
            )
        defaults = kind()
        self._rows, self._length = rows, length
        self._config = kind(**{key: _like(defaults, key, text) for key, text in settings.items()})
        self._class = _head(transformers, self._config)

    def make(self, rows: int | None) -> tuple[Fakes, nn.Module, Any]:
        """The model and a batch of so many rows (None: those that were asked for), without data."""
        fakes = Fakes()
        try:
            with fakes:
                model = self._class(self._config)
        except Exception as error:
            if not needs_values(error):
                raise
            # Its constructor reads numbers.
            model = fakes.copy(self._class(self._config))
        with fakes:
            return fakes, model.train(), self._batch(model, rows or self._rows)

    def _batch(self, model: nn.Module, rows: int) -> dict[str, torch.Tensor]:
        config, takes = self._config, inspect.signature(model.forward).parameters
        batch: dict[str, torch.Tensor] = {}
        if "pixel_values" in takes:
            size = getattr(config, "image_size", 224)
            sizes = list(size) if isinstance(size, (list, tuple)) else [size, size]
            batch["pixel_values"] = torch.empty(rows, getattr(config, "num_channels", 3), *sizes)
            batch["labels"] = torch.zeros(rows, dtype=torch.long)
            return batch
        if "input_ids" not in takes:
            raise UsageError(
                f"{_WHO}: {type(model).__name__} takes neither input_ids nor pixel_values; write a function that "
                "returns (model, batch), and give module:function"
            )
        tokens = torch.zeros(rows, self._length, dtype=torch.long)
        has_classes = type(model).__name__.endswith("ForSequenceClassification")
        return {"input_ids": tokens, "labels": torch.zeros(rows, dtype=torch.long) if has_classes else tokens.clone()}


def _head(transformers: Any, config: Any) -> Callable[[Any], nn.Module]:
    """The class of a model with a loss for ``config``."""
    for name in HEADS:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            build: Callable[[Any], nn.Module] = auto.from_config
            return build
    raise UsageError(
        f"{_WHO}: transformers has no model with a language-model head or a classifier for {type(config).__name__}; "
        "write a function that returns (model, batch), and give module:function"
    )


def _like(defaults: Any, key: str, text: str) -> Any:
    """``text`` as a value of the type that the configuration's field has by default."""
    known = set(defaults.to_dict()) | set(inspect.signature(type(defaults).__init__).parameters)
    if key not in known:
        raise UsageError(
            f"{_WHO}: {type(defaults).__name__} has no field {key!r}; its fields: {', '.join(sorted(known))}"
        )
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """``["num_hidden_layers=2"]`` as a mapping.

    Raises:
        UsageError: a text without "=".
    """
    for text in texts:
        if "=" not in text:
            raise UsageError(f"{_WHO}: --set takes FIELD=VALUE, got {text!r}")
    return dict(text.split("=", 1) for text in texts)
