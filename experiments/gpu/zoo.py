"""The zoo of ``experiments.architectures`` on one device: each model captured with its optimizer, against eager."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import graphpasses as gp
from experiments.architectures.architecture import Architecture
from experiments.gpu.result import require
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.passes import FuseExactly
from graphpasses.passes.runner import Pipeline

__all__ = ["architectures", "fused_architectures"]

_WORKERS = 4
_SEED = 7


def architectures(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Trains each architecture in float32 and in bf16 autocast, for a fifth of the steps, deterministically.

    A refusal that FSDP2's eager has alone does not count here: these models are not sharded.
    """
    return _judge_all(device, num_steps, fused=False)


def fused_architectures(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """The same of every eighth architecture, with ``fuse-exactly``."""
    return _judge_all(device, num_steps, fused=True)


def _judge_all(device: str, num_steps: int, *, fused: bool) -> tuple[bool, list[tuple[str, str]]]:
    require("transformers")
    from experiments.architectures.zoo import ARCHITECTURES

    names = [each.name for each in ARCHITECTURES[:: 8 if fused else 1]]
    jobs = [(name, device, max(num_steps // 5, 3), fused) for name in names]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_WORKERS, mp_context=spawn) as pool:
        rows = list(pool.map(_judge, *zip(*jobs, strict=True)))
    found = [(name, text) for (name, *_), (_, text) in zip(jobs, rows, strict=True)]
    num_equal = sum(text == "equal" for _, text in rows)
    return all(is_right for is_right, _ in rows), [("equal in both dtypes", f"{num_equal} of {len(rows)}"), *found]


def _judge(name: str, device: str, num_steps: int, fused: bool) -> tuple[bool, str]:
    from experiments.architectures.zoo import ARCHITECTURES

    torch.use_deterministic_algorithms(True)
    (case,) = (each for each in ARCHITECTURES if each.name == name)
    texts, is_right = [], True
    for dtype in (None, torch.bfloat16):
        right, text = _compare(case, device, num_steps, dtype, fused)
        is_right &= right
        texts.append(text)
    print(f"  {name}: {texts}", flush=True)
    return is_right, texts[0] if texts[0] == texts[1] else f"float32: {texts[0]}; autocast: {texts[1]}"


def _compare(
    case: Architecture, device: str, num_steps: int, dtype: torch.dtype | None, fused: bool
) -> tuple[bool, str]:
    try:
        eager = _train(case, device, num_steps, dtype)
    except Exception as error:
        return True, f"eager: {_said(error)}"
    control = _train(case, device, num_steps, dtype, rate=1.1e-3)
    try:
        captured = _train(case, device, num_steps, dtype, passes=Pipeline((FuseExactly(),) if fused else ()))
    except Exception as error:
        is_refused = isinstance(error, CaptureError) and not isinstance(error, FidelityError)
        return is_refused, _said(error)
    if captured == eager:
        return control != eager, "equal" if control != eager else "equal, and the control too"
    if _train(case, device, num_steps, dtype) != eager:
        return True, "eager does not repeat itself"
    return False, f"DIFFERS in step {[a == b for a, b in zip(captured, eager, strict=True)].index(False) + 1}"


def _train(
    case: Architecture,
    device: str,
    num_steps: int,
    dtype: torch.dtype | None,
    *,
    passes: Pipeline | None = None,
    rate: float = 1e-3,
) -> list[str]:
    """Returns after each step the loss and a hash of all weights."""
    torch.manual_seed(_SEED)
    model = case.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(_SEED)
    batches = [_on(device, case.inputs(generator)) for _ in range(num_steps)]

    def loss_fn(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss: Tensor = model(**batch).loss
        return loss

    step = None
    if passes is not None:
        step = passes.run(gp.capture_train_step(loss_fn, model, batches[0], optimizer=optimizer))
    torch.manual_seed(_SEED)
    seen = []
    for batch in batches:
        if step is None:
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = step(batch)
        seen.append(f"{loss.item()!r} {gp.weight_hash(model)}")
    return seen


def _on(device: str, batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:160]}"
