"""A decoder in bf16 whose exact operators are fused: bits against eager FSDP2, time, and time in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import graphpasses as gp
from experiments.exact_fusion.models import VOCAB, Decoder, loss_fn
from experiments.gpu.steps import recorded_step, sharded, wait, world
from experiments.harness.bench import time_rounds

__all__ = ["exact_fusion"]

EAGER, AGAIN, CAPTURED, FUSED = "eager", "eager again", "captured", "captured, fused"
CONTROL = "control, each layer compiled by Inductor"


def exact_fusion(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Hashes of weights after each step, with eager's AdamW; times of gradients alone.

    With deterministic algorithms: the backward of attention may add in any order without.
    """
    torch.use_deterministic_algorithms(True)
    layers, dim, length, batch = (8, 1024, 512, 8) if device == "cuda" else (2, 128, 32, 2)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(VOCAB, (batch, length + 1), generator=generator).to(device) for _ in range(num_steps)]
    found, hashes, runs = [], {}, {}
    with world(device):
        for name in (EAGER, AGAIN, CAPTURED, FUSED, CONTROL):
            torch.manual_seed(0)
            model: Any = sharded(Decoder(layers, dim, length).to(device), device)
            if name == CONTROL:
                for layer in model.layers:
                    layer.compile()
            step: Any = None
            if name in (CAPTURED, FUSED):
                captured = gp.capture_train_step(loss_fn, model, data[0])
                step = gp.default_pipeline(fuse=name == FUSED).run(captured)
            gradients: Callable[[Tensor], object] = step if step is not None else partial(_backward, model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            hashes[name] = []
            for tokens in data:
                gradients(tokens)
                optimizer.step()
                optimizer.zero_grad()
                hashes[name].append(gp.weight_hash(model))
            runs[name] = partial(_run, gradients, model, data, device)
            if name == FUSED:
                found += [("fused", note) for note in step.report["fuse-exactly"].notes]
            if step is not None and device == "cuda":
                graph, _ = recorded_step(step, model, data[0])
                runs[f"{name}, in a CUDA graph"] = partial(_replay, graph, device)
        timings = time_rounds(runs, max(5, num_steps))
    for name in hashes:
        equal = sum(a == b for a, b in zip(hashes[name], hashes[EAGER], strict=True))
        found.append((name, f"{equal} of {num_steps} hashes equal"))
    found += [(f"{name}, gradients", f"{1e3 * timings[name].fastest:.2f} ms") for name in runs]
    if hashes[AGAIN] != hashes[EAGER]:
        return True, [("eager", "does not repeat itself: bits say nothing"), *found]
    is_right = hashes[EAGER] == hashes[CAPTURED] == hashes[FUSED] and hashes[CONTROL][-1] != hashes[EAGER][-1]
    return is_right, found


def _backward(model: nn.Module, tokens: Tensor) -> None:
    loss_fn(model, tokens).backward()


def _run(
    gradients: Callable[[Tensor], object], model: nn.Module, data: list[Tensor], device: str, index: int
) -> None:
    gradients(data[index % len(data)])
    model.zero_grad()
    wait(device)


def _replay(graph: torch.cuda.CUDAGraph, device: str, index: int) -> None:
    graph.replay()
    wait(device)
