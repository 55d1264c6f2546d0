"""Models that others wrote, trained on the device: captured steps against eager, in bits, time and memory."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn

import graphpasses as gp
from graphpasses.errors import CaptureError, FidelityError

__all__ = ["strangers_models"]

Batch = tuple[Tensor, ...]
_SEED = 7


def _gpt2(device: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=8))


def _llama(device: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=1000, num_key_value_heads=4, **sizes))


def _bert(device: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=1000, **sizes))


def _vision(name: str, **options: Any) -> Callable[[str], nn.Module]:
    return lambda device: importlib.import_module("timm").create_model(name, num_classes=10, **options)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        self.lstm = nn.LSTM(128, 128, num_layers=2, dropout=0.2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class _Clicks(nn.Module):
    """Bags of ids, features and their pairs, as recommenders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(10_000, 32, mode="sum") for _ in range(8))
        self.top = nn.Sequential(nn.Linear(8 * 32 + 28, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        pooled = torch.stack([bag(ids) for bag, ids in zip(self.bags, tokens.tensor_split(8, 1), strict=True)], 1)
        rows, columns = torch.triu_indices(8, 8, 1)
        pairs = (pooled @ pooled.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([pooled.flatten(1), pairs], 1))


def _language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _masked_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    kept = (tokens % 5 > 0).long()
    loss: Tensor = model(input_ids=tokens, attention_mask=kept, labels=tokens.where(kept.bool(), -100)).loss
    return loss


def _tag_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def _click_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(tokens)[:, 0], (tokens[:, 0] % 2).float())


@dataclass(frozen=True)
class _Case:
    """A model and its loss; ``autocast`` is the dtype of products, ``scaled`` whether a GradScaler is in the loop."""

    build: Callable[[str], nn.Module]
    loss_fn: Callable[..., Tensor]
    autocast: torch.dtype | None = None
    images: int = 0
    scaled: bool = False


_CASES = {
    "transformers GPT-2, dropout, bf16 autocast": _Case(_gpt2, _language_loss, torch.bfloat16),
    "transformers Llama, bf16 autocast": _Case(_llama, _language_loss, torch.bfloat16),
    "transformers BERT, padded": _Case(_bert, _masked_loss),
    "timm ViT, drop path": _Case(
        _vision("vit_tiny_patch16_224", img_size=64, drop_path_rate=0.1), _image_loss, torch.bfloat16, images=64
    ),
    "timm ResNet-18": _Case(_vision("resnet18"), _image_loss, images=64),
    "timm ConvNeXt, fp16 autocast, GradScaler": _Case(
        _vision("convnext_atto"), _image_loss, torch.float16, images=64, scaled=True
    ),
    "timm EfficientNet": _Case(_vision("efficientnet_b0"), _image_loss, images=64),
    "LSTM, dropout": _Case(lambda device: _Tagger(), _tag_loss),
    "EmbeddingBags": _Case(lambda device: _Clicks(), _click_loss),
}


def strangers_models(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Trains each model eagerly, eagerly again and captured: bits, medians of time, and peaks of memory.

    cuDNN's deterministic algorithms alone are taken; eager training does not repeat its own bits with the others.
    """
    is_right, found = True, []
    for name, case in _CASES.items():
        try:
            case.build(device)
        except ImportError as error:
            found.append((name, f"skipped: {error}"))
            continue
        runs = {}
        try:
            with cudnn.flags(True, deterministic=True):
                for run in ("eager", "eager again", "captured", "control"):
                    runs[run] = _train(case, device, num_steps, run)
        except (gp.GraphPassesError, RuntimeError) as error:
            is_refused = isinstance(error, CaptureError) and not isinstance(error, FidelityError)
            is_right &= is_refused
            found.append((name, f"{type(error).__name__}: {str(error).strip()}"))
            continue
        print(f"  {name}", flush=True)
        hashes, seconds, memory = zip(*runs.values(), strict=True)
        equal = [sum(a == b for a, b in zip(each, hashes[0], strict=True)) for each in hashes]
        repeats = equal[1] == num_steps
        is_right &= (equal[2] == num_steps or not repeats) and equal[3] < num_steps
        text = f"{equal[2]} of {num_steps} steps equal, control {equal[3]}"
        if not repeats:
            text += f", eager again {equal[1]}"
        text += f"; {1e3 * seconds[0]:.1f} and {1e3 * seconds[2]:.1f} ms"
        if device == "cuda":
            text += f"; {memory[0] / 2**20:,.0f} and {memory[2] / 2**20:,.0f} MiB"
        found.append((name, text))
    return is_right, found


def _train(case: _Case, device: str, num_steps: int, run: str) -> tuple[list[str], float, int]:
    """Returns after each step a hash of the loss and all weights, the median of seconds, and the peak of bytes."""
    torch.manual_seed(_SEED)
    model = case.build(device).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, enabled=case.scaled, init_scale=2.0**10, growth_interval=3)
    factor = torch.ones((), device=device)

    def loss_fn(model: nn.Module, factor: Tensor, *batch: Tensor) -> Tensor:
        context = torch.autocast(device, case.autocast) if case.autocast else nullcontext()
        with context:
            loss = case.loss_fn(model, *batch)
        return loss.float() * factor

    data = list(_batches(case, device, num_steps))
    step = gp.capture_train_step(loss_fn, model, factor, *data[0]) if run == "captured" else None
    torch.manual_seed(_SEED + (run == "control"))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    hashes, seconds = [], []
    for index, batch in enumerate(data):
        start = time.perf_counter()
        scale = scaler.scale(factor)
        if step is None:
            loss = loss_fn(model, scale, *batch)
            loss.backward()
        else:
            loss = step(scale, *batch)
        if run == "control" and index == 0:
            next(model.parameters()).grad.view(-1)[0] += 1
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        hashes.append(f"{loss.item()!r} {gp.weight_hash(model)}")
    return hashes, statistics.median(seconds), torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _batches(case: _Case, device: str, num: int) -> Iterator[Batch]:
    generator, size = torch.Generator().manual_seed(1), 16 if device == "cuda" else 2
    for _ in range(num):
        if case.images:
            images = torch.randn(size, 3, case.images, case.images, generator=generator)
            yield images.to(device), torch.randint(0, 10, (size,), generator=generator).to(device)
        else:
            yield (torch.randint(0, 1000, (size, 8 * size), generator=generator).to(device),)
