"""Trains one decoder in several ways side by side: compares their bits, and times them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import profile

import graphpasses
from experiments.exact_fusion.models import VOCAB, Decoder, loss_fn
from experiments.harness.bench import Timing, time_rounds
from graphpasses.capture import capture_train_step
from graphpasses.capture.compile_report import CompileReport
from graphpasses.identity import same_bits
from graphpasses.passes import default_pipeline

EAGER, CAPTURED, FUSED = "eager FSDP2", "captured step", "captured step, fused"
GRADIENTS = "captured step, fused, eager's optimizer"
INDUCTOR = "torch.compile of each layer (control)"
PLAIN, COMPILED, COMPILED_FUSED = "eager, bf16", "gp.compile, aot_eager", "gp.compile, aot_eager, fused"
PLAIN_INDUCTOR = "gp.compile, inductor (control)"
# What is compared and timed, the first with all others; and which of them captures, and which is fused.
FSDP2 = (EAGER, CAPTURED, FUSED, GRADIENTS, INDUCTOR)
WITHOUT_FSDP = (PLAIN, COMPILED, COMPILED_FUSED, PLAIN_INDUCTOR)
CONTROLS = (INDUCTOR, PLAIN_INDUCTOR)
PRODUCTS = ("aten::mm", "aten::_scaled_dot_product", "aten::bmm", "aten::addmm")  # beginnings of names


@dataclass
class Variant:
    """A model that is trained in one way."""

    model: nn.Module
    step: Callable[[Tensor], Tensor]  # updates, and leaves gradients where eager's optimizer updates
    report: Callable[[], str] = str  # how much is fused, where it is
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What was found."""

    first_difference: dict[str, str]  # by variant: the first step and value that is not eager's, or nothing
    cpu: dict[str, Timing]
    wall: dict[str, Timing]
    share_of_products: float  # of the captured step's time
    report: str  # how much was fused
    seconds_to_compile: float


_OPTIONS: dict[str, dict[str, Any]] = {
    COMPILED: {"inner": "aot_eager"},
    COMPILED_FUSED: {"inner": "aot_eager", "fuse": True},
    PLAIN_INDUCTOR: {"inner": "inductor"},
}


def make(name: str, num_layers: int, dim: int, length: int, batch: int) -> Variant:
    """Makes a variant; all have the same weights."""
    torch.manual_seed(0)
    model = Decoder(num_layers, dim, length)
    if name in WITHOUT_FSDP:
        return _make_plain(name, model.bfloat16())
    mesh = dist.init_device_mesh("cpu", (1,))
    if name == INDUCTOR:
        for layer in model.layers:
            layer.compile()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.zeros(batch, length + 1, dtype=torch.long)
    if name in (CAPTURED, FUSED):
        captured = capture_train_step(loss_fn, model, tokens, optimizer=optimizer)
        captured = default_pipeline(fuse=name == FUSED).run(captured)
        return Variant(model, captured, lambda: captured.report["fuse-exactly"].notes[0])
    if name == GRADIENTS:
        run = default_pipeline(fuse=True).run(capture_train_step(loss_fn, model, tokens))
        return _updated(model, optimizer, run)
    return _updated(model, optimizer, _backward(model))


def _make_plain(name: str, model: nn.Module) -> Variant:
    report = CompileReport()
    call = graphpasses.compile(model, report=report, **_OPTIONS[name]) if name in _OPTIONS else model
    variant = _updated(model, torch.optim.AdamW(model.parameters(), foreach=True), _backward(call))

    def fused() -> str:
        passes = [each for graph in report.by_graph.values() for each in graph if each.name == "fuse-exactly"]
        return "\n".join(note for each in passes for note in each.notes)

    return replace(variant, report=fused)


def _backward(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(tokens: Tensor) -> Tensor:
        loss = loss_fn(call, tokens)
        loss.backward()
        return loss.detach()

    return run


def _updated(model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[Tensor], Tensor]) -> Variant:
    gradients: dict[str, Tensor] = {}

    def step(tokens: Tensor) -> Tensor:
        loss = run(tokens)
        gradients.update(
            {fqn: parameter.grad for fqn, parameter in model.named_parameters() if parameter.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Variant(model, step, gradients=gradients)


def measure(
    names: Sequence[str], num_layers: int, dim: int, length: int, batch: int, num_steps: int, num_rounds: int
) -> Result:
    """Trains variants on the same batches, comparing all bits after each step with the first's; then times them.

    The third is fused, and the second is what it is compared with.
    """
    eager, plain, fused = names[:3]
    variants = {name: make(name, num_layers, dim, length, batch) for name in names}
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(VOCAB, (batch, length + 1), generator=generator) for _ in range(num_steps)]
    found = dict.fromkeys(names, "")
    seconds = 0.0
    for index, tokens in enumerate(batches):
        losses = {}
        for name, variant in variants.items():
            start = time.perf_counter()
            losses[name] = variant.step(tokens)
            if name == fused and index == 1:  # the first step makes the optimizer's state, by torch's own functions
                seconds = time.perf_counter() - start
        for name, variant in variants.items():
            what = _difference(variants[eager], losses[eager], variant, losses[name])
            if what and not found[name]:
                found[name] = f"{what}, step {index}"
    steps = {
        name: (lambda index, step=variant.step: step(batches[index % num_steps]))
        for name, variant in variants.items()
        if name != GRADIENTS
    }
    return Result(
        found,
        time_rounds(steps, num_rounds, cpu_time=True),
        time_rounds(steps, num_rounds),
        _share_of_products(lambda: variants[plain].step(batches[0])),
        variants[fused].report(),
        seconds,
    )


def _difference(eager: Variant, loss: Tensor, variant: Variant, its: Tensor) -> str:
    if not same_bits(loss, its):
        return "the loss"
    for fqn, gradient in variant.gradients.items():
        if not same_bits(eager.gradients[fqn], gradient):
            return f"the gradient of {fqn}"
    weights = zip(eager.model.named_parameters(), variant.model.parameters(), strict=True)
    return next((f"the weight {fqn}" for (fqn, a), b in weights if not same_bits(a, b)), "")


def _share_of_products(step: Callable[[], object], num_steps: int = 5) -> float:
    """Returns how much of a step's time its products of matrices and attention take, which stay as they are."""
    with profile() as profiled:
        for _ in range(num_steps):
            step()
    times = {each.key: each.self_cpu_time_total for each in profiled.key_averages()}
    return sum(time for name, time in times.items() if name.startswith(PRODUCTS)) / sum(times.values())
