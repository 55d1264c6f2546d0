"""Models of images, and of images with texts."""

from __future__ import annotations

import functools

import torch

from experiments.architectures.architecture import Architecture
from experiments.architectures.inputs import IMAGE, NUM_CLASSES, VOCAB, classified_images, images_and_texts
from experiments.architectures.zoo.sizes import TOKENS

__all__ = ["IMAGES"]

_LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 176}
_PATCHES = {**_LAYERS, "image_size": IMAGE, "patch_size": 8}
_CLASSES = {"num_labels": NUM_CLASSES}
_TEXT = {**TOKENS, **_LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 16}
_TOWERS = {"text_config": _TEXT, "vision_config": _PATCHES, "projection_dim": 32}
_ZERO_D = "eager: ValueError: fully_shard doesn't support scalar parameters"
_RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 64],
    "depths": [1, 1],
    "layer_type": "basic",
    **_CLASSES,
}

_image = functools.partial(Architecture, family="vision", inputs=classified_images)
# A CPU's batch_norm does not take weights in bf16 with its statistics in fp32.
_batch_norm = functools.partial(_image, compute=torch.float32)
_resnet = functools.partial(_image, model="ResNetForImageClassification", options=_RESNET)
_pair = functools.partial(Architecture, family="image and text", inputs=images_and_texts)

IMAGES = (
    _image("vit", model="ViTForImageClassification", options=_PATCHES | _CLASSES),
    _image(
        "deit, dropout",
        model="DeiTForImageClassification",
        options=_PATCHES | _CLASSES | {"hidden_dropout_prob": 0.1},
    ),
    _image(
        "dinov2, paths dropped",
        model="Dinov2ForImageClassification",
        options=_PATCHES | _CLASSES | {"mlp_ratio": 2, "drop_path_rate": 0.2},
    ),
    _image("beit", model="BeitForImageClassification", options=_PATCHES | _CLASSES),
    _image(
        "swin, paths dropped",
        model="SwinForImageClassification",
        options={
            "image_size": IMAGE,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [2, 1],
            "num_heads": [2, 4],
            "window_size": 4,
            **_CLASSES,
        },
    ),
    _image(
        "convnext",
        model="ConvNextForImageClassification",
        options={
            "image_size": IMAGE,
            "patch_size": 2,
            "hidden_sizes": [16, 32, 64],
            "depths": [1, 1, 1],
            "num_stages": 3,
            **_CLASSES,
        },
    ),
    _resnet("resnet, BatchNorm", compute=torch.float32),
    _resnet(
        "resnet, BatchNorm in bf16",
        refused="eager: RuntimeError: expected scalar type BFloat16 but found Float",
    ),
    _batch_norm(
        "regnet, BatchNorm",
        model="RegNetForImageClassification",
        options={
            "embedding_size": 16,
            "hidden_sizes": [32, 64],
            "depths": [1, 1],
            "groups_width": 16,
            **_CLASSES,
        },
    ),
    _batch_norm(
        "mobilenet_v2, BatchNorm, dropout",
        model="MobileNetV2ForImageClassification",
        options={"image_size": IMAGE, "depth_multiplier": 0.35, **_CLASSES},
    ),
    _pair("clip", model="CLIPModel", options=_TOWERS, refused=_ZERO_D),
    _pair("siglip", model="SiglipModel", options=_TOWERS),
    _pair("blip", model="BlipModel", options=_TOWERS, refused=_ZERO_D),
)
