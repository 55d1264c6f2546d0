"""Trains one decoder in several ways side by side: compares their bits, and times them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import profile

from experiments.exact_fusion.models import VOCAB, Decoder, loss_fn
from experiments.harness.bench import Timing, time_rounds
from graphpasses.capture import capture_train_step
from graphpasses.graph import CapturedStep
from graphpasses.identity import same_bits
from graphpasses.passes import default_pipeline

EAGER, CAPTURED, FUSED = "eager FSDP2", "captured step", "captured step, fused"
GRADIENTS = "captured step, fused, eager's optimizer"
INDUCTOR = "torch.compile of each layer (control)"
PRODUCTS = ("aten::mm", "aten::_scaled_dot_product", "aten::bmm", "aten::addmm")  # beginnings of names


@dataclass
class Variant:
    """A model that is trained in one way."""

    model: nn.Module
    step: Callable[[Tensor], Tensor]  # updates, and leaves gradients where eager's optimizer updates
    captured: CapturedStep | None = None
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


def make(name: str, num_layers: int, dim: int, length: int, batch: int) -> Variant:
    """Makes a variant; all have the same weights."""
    torch.manual_seed(0)
    model = Decoder(num_layers, dim, length)
    mesh = dist.init_device_mesh("cpu", (1,))
    if name == INDUCTOR:
        for layer in model.layers:
            layer.compile()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.zeros(batch, length + 1, dtype=torch.long)
    gradients: dict[str, Tensor] = {}

    def update() -> None:
        gradients.update(
            {fqn: parameter.grad for fqn, parameter in model.named_parameters() if parameter.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad()

    if name in (CAPTURED, FUSED):
        captured = capture_train_step(loss_fn, model, tokens, optimizer=optimizer)
        captured = default_pipeline(fuse=name == FUSED).run(captured)
        return Variant(model, captured, captured)
    run: Callable[[Tensor], Tensor]
    if name == GRADIENTS:
        run = default_pipeline(fuse=True).run(capture_train_step(loss_fn, model, tokens))
    else:

        def run(tokens: Tensor) -> Tensor:
            loss = loss_fn(model, tokens)
            loss.backward()
            return loss.detach()

    def step(tokens: Tensor) -> Tensor:
        loss = run(tokens)
        update()
        return loss

    return Variant(model, step, gradients=gradients)


def measure(num_layers: int, dim: int, length: int, batch: int, num_steps: int, num_rounds: int) -> Result:
    """Trains all variants on the same batches, comparing all bits after each step; then times them."""
    names = (EAGER, CAPTURED, FUSED, GRADIENTS, INDUCTOR)
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
            if name == FUSED and index == 1:  # the first step makes the optimizer's state, by torch's own functions
                seconds = time.perf_counter() - start
        for name, variant in variants.items():
            what = _difference(variants[EAGER], losses[EAGER], variant, losses[name])
            if what and not found[name]:
                found[name] = f"{what}, step {index}"
    captured = variants[FUSED].captured
    assert captured is not None
    assert captured.report is not None
    steps = {
        name: (lambda index, step=variant.step: step(batches[index % num_steps]))
        for name, variant in variants.items()
        if name != GRADIENTS
    }
    return Result(
        found,
        time_rounds(steps, num_rounds, cpu_time=True),
        time_rounds(steps, num_rounds),
        _share_of_products(lambda: variants[CAPTURED].step(batches[0])),
        captured.report["fuse-exactly"].notes[0],
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
