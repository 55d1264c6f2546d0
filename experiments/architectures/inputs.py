"""Random inputs and labels; each call draws others from the generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "IMAGE",
    "NUM_CLASSES",
    "NUM_MELS",
    "VOCAB",
    "classified_images",
    "classified_spectrograms",
    "classified_tokens",
    "classified_waves",
    "coded_tokens",
    "image_and_tokens",
    "images_and_texts",
    "padded_tokens",
    "spoken_waves",
    "tokens",
    "transcribed_spectrograms",
    "translated_tokens",
]

VOCAB, NUM_CLASSES, IMAGE, NUM_MELS = 203, 10, 32, 16
PAD, EOS, FIRST = 0, 2, 3
"""Tokens below ``FIRST`` mean something to models."""

_BATCH, _LENGTH = 2, 16


def tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """A text, each token of which has a label."""
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def coded_tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """A sound as four rows of tokens, each of which has a label."""
    codes = torch.randint(FIRST, VOCAB, (2, 4, _BATCH, _LENGTH), generator=generator)
    return {"input_ids": codes[0].flatten(0, 1), "labels": codes[1].permute(1, 2, 0)}


def image_and_tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """An image and a text, each token of which has a label."""
    size = 2 * IMAGE
    return tokens(generator) | {"pixel_values": torch.randn(_BATCH, 3, size, size, generator=generator)}


def padded_tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """A text, padded by another number of tokens in each row."""
    mask = torch.ones(_BATCH, _LENGTH, dtype=torch.long)
    for row in mask:
        row[int(torch.randint(_LENGTH // 2, _LENGTH, (), generator=generator)) :] = 0
    batch = tokens(generator)
    return {
        "input_ids": batch["input_ids"].masked_fill(mask == 0, PAD),
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, -100),
    }


def classified_tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """A text with one label."""
    return {"input_ids": _tokens(generator), "labels": _classes(generator)}


def translated_tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """A text and its translation, both with an end."""
    batch = tokens(generator)
    for text in batch.values():
        text[:, -1] = EOS
    return batch


def classified_images(generator: torch.Generator) -> dict[str, Tensor]:
    """Images with one label each."""
    return {"pixel_values": _images(generator), "labels": _classes(generator)}


def images_and_texts(generator: torch.Generator) -> dict[str, Any]:
    """Pairs of an image and a text; which belong together is what is learnt."""
    texts = _tokens(generator)
    texts[:, -1] = EOS
    return {"input_ids": texts, "pixel_values": _images(generator), "return_loss": True}


def transcribed_spectrograms(generator: torch.Generator) -> dict[str, Tensor]:
    """Spectrograms, channels first, with a text each."""
    return {
        "input_features": torch.randn(_BATCH, NUM_MELS, 64, generator=generator),
        "labels": _tokens(generator),
    }


def classified_spectrograms(generator: torch.Generator) -> dict[str, Tensor]:
    """Spectrograms, time first, with one label each."""
    return {
        "input_values": torch.randn(_BATCH, 32, NUM_MELS, generator=generator),
        "labels": _classes(generator),
    }


def classified_waves(generator: torch.Generator) -> dict[str, Tensor]:
    """Sound waves with one label each."""
    return {"input_values": torch.randn(_BATCH, 800, generator=generator), "labels": _classes(generator)}


def spoken_waves(generator: torch.Generator) -> dict[str, Tensor]:
    """Sound waves with the few tokens that are said in them."""
    labels = torch.randint(FIRST, VOCAB, (_BATCH, 4), generator=generator)
    return {"input_values": torch.randn(_BATCH, 800, generator=generator), "labels": labels}


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(FIRST, VOCAB, (_BATCH, _LENGTH), generator=generator)


def _classes(generator: torch.Generator) -> Tensor:
    return torch.randint(NUM_CLASSES, (_BATCH,), generator=generator)


def _images(generator: torch.Generator) -> Tensor:
    return torch.randn(_BATCH, 3, IMAGE, IMAGE, generator=generator)
