"""Networks at the sizes that people train: ``build(name) -> (model, batch, loss_fn)``, as in ``networks.py``.

Random weights, dropout as each architecture has it. gpt2 has a vocabulary of 50257 and llama one of 32000, and both
return their logits; gpt2-loss is gpt2 with the logits dropped inside of the model, and gpt2-breaks is gpt2 with graph
breaks behind its layers and before its loss. bert-12 and gpt2-12 have twelve layers. ``small=True`` gives the same
architectures in a size for trials, and ``times=n`` a batch of n times as many rows. All but unet need transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from networks import Batch, Network
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
NAMES = ("bert", "resnet50", "gpt2", "gpt2-loss", "gpt2-breaks", "llama", "vit", "unet")
DEEP = ("bert-12", "gpt2-12")


@dataclass(frozen=True)
class Scale:
    """``small``: fewer layers, channels, tokens and pixels, for trials; ``times``: how many times the rows."""

    small: bool = False
    times: int = 1

    def of(self, whole: int, small: int) -> int:
        return small if self.small else whole


def build(name: str, *, small: bool = False, times: int = 1) -> Network:
    torch.manual_seed(0)
    networks: dict[str, Callable[[Scale], Network]] = {
        "bert": _bert, "bert-12": partial(_bert, layers=12), "resnet50": _resnet50, "gpt2": _gpt2,
        "gpt2-12": partial(_gpt2, layers=12), "gpt2-loss": _gpt2_loss, "gpt2-breaks": _gpt2_breaks, "llama": _llama,
        "vit": _vit, "unet": _unet,
    }  # fmt: skip
    return networks[name](Scale(small, times))


def _bert(scale: Scale, layers: int = 6) -> Network:
    from transformers import BertConfig, BertForSequenceClassification

    rows, width = scale.of(8, 4) * scale.times, scale.of(768, 128)
    batch = {
        "input_ids": torch.randint(0, scale.of(30522, 1000), (rows, scale.of(256, 64))),
        "labels": torch.randint(0, 2, (rows,)),
    }
    config = BertConfig(
        num_hidden_layers=scale.of(layers, 2), hidden_size=width, num_attention_heads=width // 64,
        intermediate_size=4 * width, vocab_size=scale.of(30522, 1000),
    )  # fmt: skip
    return BertForSequenceClassification(config), batch, _own_loss


def _resnet50(scale: Scale) -> Network:
    from transformers import ResNetConfig, ResNetForImageClassification

    depths = [1, 1, 1, 1] if scale.small else [3, 4, 6, 3]
    config = ResNetConfig(depths=depths)
    return ResNetForImageClassification(config), _images(scale), _own_loss


def _vit(scale: Scale) -> Network:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_hidden_layers=scale.of(12, 2), image_size=scale.of(224, 64))
    return ViTForImageClassification(config), _images(scale), _own_loss


def _tokens(scale: Scale, vocabulary: int) -> Batch:
    tokens = torch.randint(0, vocabulary, (4 * scale.times, scale.of(512, 64)))
    return {"input_ids": tokens, "labels": tokens}


def _gpt2(scale: Scale, layers: int = 2) -> Network:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, vocabulary = scale.of(768, 128), scale.of(50257, 1000)
    batch = _tokens(scale, vocabulary)
    config = GPT2Config(
        n_layer=scale.of(layers, 2), n_embd=width, n_head=width // 64, vocab_size=vocabulary,
        bos_token_id=vocabulary - 1, eos_token_id=vocabulary - 1,
    )  # fmt: skip
    return GPT2LMHeadModel(config), batch, _own_loss


def _llama(scale: Scale) -> Network:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, vocabulary = scale.of(768, 128), scale.of(32000, 1000)
    batch = _tokens(scale, vocabulary)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=scale.of(2048, 344), num_hidden_layers=2,
        num_attention_heads=width // 64, vocab_size=vocabulary,
    )  # fmt: skip
    return LlamaForCausalLM(config), batch, _own_loss


class LossAlone(nn.Module):
    """A language model whose caller reads its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


def _gpt2_loss(scale: Scale) -> Network:
    model, batch, _ = _gpt2(scale)
    return LossAlone(model), batch, lambda model, batch: model(**batch)


class LossBehindBreak(nn.Module):
    """A language model that computes its loss, of the tokens that come next, in a graph of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=input_ids).logits
        torch._dynamo.graph_break()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _break_after(module: nn.Module, arguments: object, result: object) -> None:
    """A forward hook behind which the graph ends."""
    torch._dynamo.graph_break()


def _gpt2_breaks(scale: Scale) -> Network:
    model, batch, _ = _gpt2(scale)
    for layer in model.get_submodule("transformer.h").children():
        layer.register_forward_hook(_break_after)
    return LossBehindBreak(model), batch, lambda model, batch: model(**batch)


class Block(nn.Module):
    """Two convolutions with group norm and a shortcut, and attention over the pixels where ``attends``."""

    def __init__(self, width: int, out: int, attends: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, width), nn.GroupNorm(8, out)])
        self.convolutions = nn.ModuleList([nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)])
        self.shortcut = nn.Conv2d(width, out, 1)
        self.attention = nn.ModuleList([nn.GroupNorm(8, out), nn.Linear(out, 3 * out), nn.Linear(out, out)])
        self.attends = attends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            hidden = convolution(F.silu(norm(hidden)))
        hidden = torch.add(hidden, self.shortcut(x))
        if not self.attends:
            return hidden
        norm, inner, outer = self.attention
        pixels = norm(hidden).flatten(2).transpose(1, 2)
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in inner(pixels).chunk(3, -1))
        found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        attended: torch.Tensor = outer(found).transpose(1, 2).unflatten(2, hidden.shape[2:])
        return hidden + attended


class UNet(nn.Module):
    """A denoising UNet of three resolutions, with attention at the lower two."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256)) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        inner = (widths[0], *widths)
        self.down = nn.ModuleList(Block(inner[i], w, i > 0) for i, w in enumerate(widths))
        self.up = nn.ModuleList(Block(2 * w, inner[i], i > 0) for i, w in reversed(list(enumerate(widths))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, kept = self.first(x), []
        for block in self.down:
            hidden = block(hidden)
            kept.append(hidden)
            hidden = F.avg_pool2d(hidden, 2)
        for block in self.up:
            hidden = block(torch.cat([F.interpolate(hidden, scale_factor=2.0), kept.pop()], 1))
        out: torch.Tensor = self.last(hidden)
        return out


def _unet(scale: Scale) -> Network:
    rows, side = 4 * scale.times, scale.of(64, 16)
    batch = {"x": torch.randn(rows, 3, side, side), "noise": torch.randn(rows, 3, side, side)}
    model = UNet((16, 32, 64) if scale.small else (64, 128, 256))
    return model, batch, lambda model, batch: F.mse_loss(model(batch["x"] + batch["noise"]), batch["noise"])


def _images(scale: Scale) -> Batch:
    rows, side = scale.of(8, 4) * scale.times, scale.of(224, 64)
    return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(0, 2, (rows,))}


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss
