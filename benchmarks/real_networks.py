"""Networks at the sizes that people train: ``build(name) -> (model, batch, loss_fn)``, as in ``networks.py``.

Random weights, dropout as each architecture has it. gpt2 has a vocabulary of 50257 and llama one of 32000, and both
return their logits; gpt2-loss is gpt2 with the logits dropped inside of the model.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from networks import Batch, Network
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
NAMES = ("bert", "resnet50", "gpt2", "gpt2-loss", "llama", "vit", "unet")


def build(name: str) -> Network:
    torch.manual_seed(0)
    networks = {"bert": _bert, "resnet50": _resnet50, "gpt2": _gpt2, "gpt2-loss": _gpt2_loss, "llama": _llama}
    return {**networks, "vit": _vit, "unet": _unet}[name]()


def _bert() -> Network:
    from transformers import BertConfig, BertForSequenceClassification

    batch = {"input_ids": torch.randint(0, 30522, (8, 256)), "labels": torch.randint(0, 2, (8,))}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=6)), batch, _own_loss


def _resnet50() -> Network:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig()), _images(), _own_loss


def _vit() -> Network:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig()), _images(), _own_loss


def _gpt2() -> Network:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 50257, (4, 512))
    return GPT2LMHeadModel(GPT2Config(n_layer=2)), {"input_ids": tokens, "labels": tokens}, _own_loss


def _llama() -> Network:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.randint(0, 32000, (4, 512))
    config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=12)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, _own_loss


class LossAlone(nn.Module):
    """A language model whose caller reads its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


def _gpt2_loss() -> Network:
    model, batch, _ = _gpt2()
    return LossAlone(model), batch, lambda model, batch: model(**batch)


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


def _unet() -> Network:
    batch = {"x": torch.randn(4, 3, 64, 64), "noise": torch.randn(4, 3, 64, 64)}
    return UNet(), batch, lambda model, batch: F.mse_loss(model(batch["x"] + batch["noise"]), batch["noise"])


def _images() -> Batch:
    return {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(0, 2, (8,))}


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss
