"""The networks of ``zoo.py``: 25 architectures of ``transformers`` and four graph nets, small and as initialised.

``build(name, dropout=...) -> (model, batch, loss_fn)``, as in ``networks.py``. Whatever is not said here, the
implementation of attention and the rates of dropout among it, is the architecture's own default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from networks import Batch, Network

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY, CLASSES = 1000, 10
ROWS, LENGTH, SHORT = 4, 128, 32
# Cora's: papers, citations in both directions, words, fields.
NODES, EDGES, FEATURES, FIELDS = 2708, 10556, 1433, 7


@dataclass(frozen=True)
class Architecture:
    """A model of ``transformers`` by the names of its classes, what to set in its configuration, and what it reads."""

    config: str
    model: str
    batch: Callable[[], Batch]
    settings: dict[str, Any] = field(default_factory=dict)


# ---- What they read ---------------------------------------------------------------------------------------------


def _text() -> Batch:
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def _short_texts() -> Batch:
    """For loops over time, which are traced step by step."""
    tokens = torch.randint(3, VOCABULARY, (8 * ROWS, LENGTH // 8))
    return {"input_ids": tokens, "labels": tokens}


def _pair_of_texts() -> Batch:
    return {**_text(), "labels": torch.randint(3, VOCABULARY, (ROWS, LENGTH // 2))}


def _images(size: int = 64) -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(0, CLASSES, (ROWS,))}


def _scenes() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(0, CLASSES, (ROWS, 64, 64))}


def _images_alone() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 128, 128)}


def _captioned() -> Batch:
    return {"input_ids": torch.randint(3, VOCABULARY, (ROWS, SHORT)), "pixel_values": torch.randn(ROWS, 3, 64, 64)}


def _spectrograms() -> Batch:
    labels = torch.randint(3, VOCABULARY, (ROWS, SHORT))
    return {"input_features": torch.randn(ROWS, 80, 2 * LENGTH), "labels": labels}


def _sound() -> Batch:
    return {"input_values": torch.randn(ROWS, 8000), "labels": torch.randint(3, 32, (ROWS, 6))}


# ---- The architectures ------------------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "head_dim": 32}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512,
}  # fmt: skip
_VISION = {"image_size": 64, "patch_size": 8}

ARCHITECTURES: dict[str, Architecture] = {
    # Encoders.
    "bert": Architecture("BertConfig", "BertForMaskedLM", _text, _SIZES),
    "albert": Architecture("AlbertConfig", "AlbertForMaskedLM", _text, {**_SIZES, "embedding_size": 64}),
    "deberta-v2": Architecture(
        "DebertaV2Config", "DebertaV2ForMaskedLM", _text,
        {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32,
         "conv_kernel_size": 3},
    ),
    "modernbert": Architecture("ModernBertConfig", "ModernBertForMaskedLM", _text, {
        **_SIZES, **_TOKENS, "cls_token_id": 1, "sep_token_id": 2, "num_hidden_layers": 3, "local_attention": 32,
    }),
    # Decoders.
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", _text, {
        **_TOKENS, "vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4,
    }),
    "gpt-neox": Architecture("GPTNeoXConfig", "GPTNeoXForCausalLM", _text, _SIZES),
    "bloom": Architecture("BloomConfig", "BloomForCausalLM", _text, {
        "vocab_size": VOCABULARY, "hidden_size": 128, "n_layer": 2, "n_head": 4,
    }),
    "llama": Architecture("LlamaConfig", "LlamaForCausalLM", _text, _LLAMA),
    "qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM", _text, _LLAMA),
    "gemma2": Architecture("Gemma2Config", "Gemma2ForCausalLM", _text, {**_LLAMA, "sliding_window": 32}),
    # Mixture of experts.
    "mixtral": Architecture("MixtralConfig", "MixtralForCausalLM", _text, {**_LLAMA, "num_local_experts": 4}),
    # State space and linear recurrence.
    "mamba": Architecture("MambaConfig", "MambaForCausalLM", _short_texts, {
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2,
    }),
    "mamba2": Architecture("Mamba2Config", "Mamba2ForCausalLM", _text, {
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 32,
        "state_size": 32, "n_groups": 2, "chunk_size": 32,
    }),
    "rwkv": Architecture("RwkvConfig", "RwkvForCausalLM", _short_texts, {
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2,
    }),
    # Encoders with decoders.
    "t5": Architecture("T5Config", "T5ForConditionalGeneration", _pair_of_texts, {
        "vocab_size": VOCABULARY, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
    "bart": Architecture("BartConfig", "BartForConditionalGeneration", _pair_of_texts, _SEQ2SEQ),
    # Vision.
    "vit": Architecture("ViTConfig", "ViTForImageClassification", _images, {**_SIZES, **_VISION}),
    "swin": Architecture("SwinConfig", "SwinForImageClassification", _images, {
        "image_size": 64, "embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "window_size": 4,
    }),
    "convnext": Architecture("ConvNextConfig", "ConvNextForImageClassification", _images, {
        "depths": [2, 2, 2, 2], "hidden_sizes": [48, 96, 192, 384],
    }),
    "resnet": Architecture("ResNetConfig", "ResNetForImageClassification", _images, {
        "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512],
    }),
    "segformer": Architecture("SegformerConfig", "SegformerForSemanticSegmentation", _scenes),
    "detr": Architecture("DetrConfig", "DetrForObjectDetection", _images_alone, {
        **{key: value for key, value in _SEQ2SEQ.items() if key != "vocab_size"},
        "num_queries": 20,
        "backbone_config": {"model_type": "resnet", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512],
                            "out_features": ["stage4"]},
    }),
    "clip": Architecture("CLIPConfig", "CLIPModel", _captioned, {
        "text_config": {**_SIZES, **_TOKENS}, "vision_config": {**_SIZES, **_VISION}, "projection_dim": 64,
    }),
    # Audio.
    "whisper": Architecture("WhisperConfig", "WhisperForConditionalGeneration", _spectrograms, {
        **_SEQ2SEQ, **_TOKENS, "max_source_positions": LENGTH, "max_target_positions": LENGTH,
        "decoder_start_token_id": 1,
    }),
    # Layers that are left out at random would make its bytes random.
    "wav2vec2": Architecture("Wav2Vec2Config", "Wav2Vec2ForCTC", _sound, {
        **_SIZES, "vocab_size": 32, "conv_dim": [64] * 7, "num_feat_extract_layers": 7, "layerdrop": 0.0,
        "num_conv_pos_embeddings": 32, "num_conv_pos_embedding_groups": 4,
    }),
}  # fmt: skip
GRAPH_NETS = {"gcn": "GCN", "gat": "GAT", "sage": "GraphSAGE", "gin": "GIN"}
NAMES = (*ARCHITECTURES, *GRAPH_NETS)


def build(name: str, *, dropout: bool = True, dtype: torch.dtype = torch.float32) -> Network:
    """A fresh network in training mode, the same in every call; without ``dropout`` nothing in it is random."""
    torch.manual_seed(0)
    model, batch, loss_fn = _graph_net(name, dropout) if name in GRAPH_NETS else _transformer(name, dropout)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return model.to(dtype).train(), batch, loss_fn


def _transformer(name: str, dropout: bool) -> Network:
    import transformers

    kind = ARCHITECTURES[name]
    config = getattr(transformers, kind.config)(**kind.settings)
    if hasattr(config, "num_labels") and "labels" in (batch := kind.batch()) and "pixel_values" in batch:
        config.num_labels = CLASSES
    if not dropout:
        _turn_off_randomness(config)
    loss = {"clip": _contrastive_loss, "detr": _boxes_loss}.get(name, _own_loss)
    return getattr(transformers, kind.model)(config), kind.batch(), loss


def _turn_off_randomness(config: Any) -> None:
    """Dropout, layers left out, and masks over time or features, in ``config`` and those within it."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _turn_off_randomness(value)
        elif isinstance(value, float) and re.search(r"drop|^mask_\w+_prob$|^apply_spec", key):
            setattr(config, key, 0.0)


def _graph_net(name: str, dropout: bool) -> Network:
    from torch_geometric.nn import models

    settings = {"heads": 8} if name == "gat" else {}
    model = getattr(models, GRAPH_NETS[name])(
        FEATURES, 64, num_layers=2, out_channels=FIELDS, dropout=0.5 if dropout else 0.0, **settings
    )
    one_way = torch.randint(0, NODES, (2, EDGES // 2))
    batch = {
        # As many words a paper as in Cora, each row summing to one.
        "x": F.normalize((torch.rand(NODES, FEATURES) < 0.0127).float(), p=1.0),
        "edge_index": torch.cat([one_way, one_way.flip(0)], dim=1),
        "labels": torch.randint(0, FIELDS, (NODES,)),
    }
    return model, batch, _node_loss


# ---- Losses -----------------------------------------------------------------------------------------------------


def _own_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _contrastive_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, return_loss=True).loss
    return loss


def _boxes_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """In place of DETR's own loss, which assigns boxes to queries in SciPy."""
    output = model(**batch)
    loss: torch.Tensor = output.logits.square().mean() + output.pred_boxes.square().mean()
    return loss


def _node_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch["edge_index"]), batch["labels"])
