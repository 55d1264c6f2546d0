"""Captured steps against eager FSDP2 on one rank: bits, CUDA graphs, Inductor, and what proofs and searches cost."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphpasses as gp
from experiments.fsdp_bench.steps import loss_fn, transformer
from experiments.gpu.result import SkippedError
from experiments.harness.bench import time_rounds
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.parity.reference import locate_step

__all__ = [
    "certificate_cost",
    "cuda_graphs",
    "inductor",
    "locate_cost",
    "parity",
    "parity_with_optimizer",
    "recorded_step",
    "sharded",
    "wait",
    "world",
]

Found = tuple[bool, list[tuple[str, str]]]

VOCAB = 1024


@contextmanager
def world(device: str) -> Iterator[None]:
    """A process group of this process alone: NCCL's on CUDA, else gloo's."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def size_on(device: str) -> tuple[int, int]:
    """Returns layers and width of the model: 150 M parameters on a GPU, and what a CPU trains in seconds."""
    return (12, 1024) if device == "cuda" else (3, 64)


def build(device: str, num_layers: int | None = None) -> nn.Module:
    """Returns a GPT-like model, sharded by FSDP2: bf16 compute, fp32 reduction."""
    usual, dim = size_on(device)
    return sharded(transformer(num_layers or usual, dim, VOCAB).to(device), device)


def sharded(model: Any, device: str) -> nn.Module:
    """Shards a model and its layers, computed in bf16, reduced in fp32; returns it."""
    mesh = dist.init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    whole: nn.Module = model
    return whole


def batches(device: str, num: int) -> list[Tensor]:
    """Returns batches of tokens, of one seed."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (4, 129), generator=generator).to(device) for _ in range(num)]


def wait(device: str) -> None:
    """Returns when the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def captured(model: nn.Module, tokens: Tensor, **options: Any) -> gp.CapturedStep:
    """Returns a captured step after the default pipeline, proved."""
    return gp.default_pipeline().run(gp.capture_train_step(loss_fn, model, tokens, **options))


Gradients = Callable[[nn.Module, Tensor, int], Tensor]


def record(path: Path, device: str, num_steps: int, start: Callable[[nn.Module, Tensor], Gradients]) -> str:
    """Trains a new model, and records losses, gradients and weights of each step.

    Args:
        path: of the run file.
        device: where.
        num_steps: optimizer steps.
        start: returns what leaves gradients in the model, and returns the loss.

    Returns:
        The median of the time that gradients take, and the peak of memory.
    """
    model, data = build(device), batches(device, num_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradients = start(model, data[0])
    if device == "cuda":
        gc.collect()  # the model of the run before is in a cycle
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    with gp.ParityRecorder(path, run=path.stem) as recorder:
        for index, tokens in enumerate(data):
            wait(device)
            begin = time.perf_counter()
            loss = gradients(model, tokens, index)
            wait(device)
            seconds.append(time.perf_counter() - begin)
            optimizer.step()
            recorder.record(index, loss, model)
            optimizer.zero_grad()
    cost = f"{1e3 * statistics.median(seconds):.1f} ms"
    return cost + (f", peak {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB" if device == "cuda" else "")


def eager(model: nn.Module, tokens: Tensor) -> Gradients:
    """Eager FSDP2."""

    def gradients(model: nn.Module, tokens: Tensor, index: int) -> Tensor:
        loss = loss_fn(model, tokens)
        loss.backward()
        return loss.detach()

    return gradients


def graph(model: nn.Module, tokens: Tensor) -> Gradients:
    """The captured step."""
    step = captured(model, tokens)
    return lambda model, tokens, index: step(tokens)


def one_bit_wrong(model: nn.Module, tokens: Tensor) -> Gradients:
    """The captured step, one bit of whose gradients is wrong in the middle of the run."""
    step = captured(model, tokens)

    def gradients(model: nn.Module, tokens: Tensor, index: int) -> Tensor:
        loss = step(tokens)
        if index == 3:
            gradient = next(model.parameters()).grad.to_local()
            gradient.view(torch.int32).view(-1)[:1].bitwise_xor_(1)
        return loss

    return gradients


def compared(device: str, num_steps: int, runs: dict[str, Callable[[nn.Module, Tensor], Gradients]]) -> Found:
    """Trains eagerly and otherwise; runs whose name begins with "control" must differ, all others must not."""
    is_right, found = True, []
    with world(device), tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name.partition(',')[0]}.jsonl" for name in ("eager", *runs)}
        costs = {
            name: record(path, device, num_steps, eager if name == "eager" else runs[name])
            for name, path in paths.items()
        }
        found.append(("eager", costs["eager"]))
        reference = gp.read_run(paths["eager"])
        for name in runs:
            comparison = gp.compare_runs(reference, gp.read_run(paths[name]))
            differs = comparison.divergence
            where = f"equal at {comparison.num_steps} steps" if differs is None else f"differs in step {differs.step}"
            is_right &= comparison.equal != name.startswith("control")
            found.append((name, where if name.startswith("control") else f"{where}; {costs[name]}"))
    return is_right, found


def parity(device: str, num_steps: int) -> Found:
    """Bits of a captured step against eager FSDP2's."""
    return compared(device, num_steps, {"captured": graph, "control, one bit of a gradient in step 3": one_bit_wrong})


def parity_with_optimizer(device: str, num_steps: int) -> Found:
    """The same with AdamW and clipping inside of the step: weights, and time."""
    if RELEASE < (2, 13):
        raise SkippedError("an optimizer's step is traced with torch 2.13: DTensor before it takes no symbolic rates")
    with world(device):
        data, hashes, seconds = batches(device, num_steps), {}, {}
        for name, norm in (("eager", 1.0), ("captured", 1.0), ("control, another norm", 1.5)):
            model = build(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
            step = None
            if name != "eager":
                step = captured(model, data[0], optimizer=optimizer, clip_norm=norm)
            hashes[name], times = [], []
            for tokens in data:
                start = time.perf_counter()
                if step is not None:
                    step(tokens)
                else:
                    loss_fn(model, tokens).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), norm)
                    optimizer.step()
                    optimizer.zero_grad()
                wait(device)
                times.append(time.perf_counter() - start)
                hashes[name].append(gp.weight_hash(model))
            seconds[name] = min(times)
    equal = {name: sum(a == b for a, b in zip(found, hashes["eager"], strict=True)) for name, found in hashes.items()}
    control = equal.pop("control, another norm")
    found = [(name, f"{equal[name]} of {num_steps} hashes equal, {1e3 * seconds[name]:.1f} ms") for name in equal]
    found.append(("control, another norm", f"{control} of {num_steps} hashes equal"))
    return equal["captured"] == num_steps and control < num_steps, found


def recorded_step(step: gp.CapturedStep, model: nn.Module, given: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Returns a CUDA graph of a step on ``given``, and the loss, which a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(given)
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        loss: Tensor = step(given)
    return recorded, loss


def cuda_graphs(device: str, num_steps: int) -> Found:
    """The captured step inside of a CUDA graph, which is replayed for each batch."""
    if device != "cuda":
        raise SkippedError("CUDA graphs need a CUDA device")

    def replayed(model: nn.Module, tokens: Tensor, *, copies: bool) -> Gradients:
        given = tokens.clone()
        recorded, loss = recorded_step(captured(model, tokens), model, given)
        kept = {parameter: parameter.grad for parameter in model.parameters()}

        def gradients(model: nn.Module, tokens: Tensor, index: int) -> Tensor:
            if copies:
                given.copy_(tokens)
            recorded.replay()
            for parameter, gradient in kept.items():  # zero_grad has let go of it
                parameter.grad = gradient
            return loss.detach()

        return gradients

    return compared(
        device,
        num_steps,
        {
            "captured in a CUDA graph": partial(replayed, copies=True),
            "control, always the first batch": partial(replayed, copies=False),
        },
    )


def inductor(device: str, num_steps: int) -> Found:
    """``gp.compile``, whose graphs Inductor compiles, against eager and ``torch.compile`` as shipped.

    With deterministic algorithms: the backward of attention in float32 does not repeat its own bits without.
    """
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = transformer(*size_on(device), VOCAB).to(device)
    data = batches(device, num_steps)
    ways: dict[str, Callable[..., Any]] = {
        "eager": model,
        "eager again": model,
        "torch.compile": torch.compile(model),
        "graphpasses, inductor": gp.compile(model, inner="inductor"),
        "graphpasses, aot_eager": gp.compile(model, inner="aot_eager"),
    }
    gradients: dict[str, list[Tensor]] = {}
    for name, way in ways.items():
        model.zero_grad()
        loss_fn(way, data[0]).backward()
        gradients[name] = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def run(way: Callable[..., Any], index: int) -> None:
        loss_fn(way, data[index % len(data)]).backward()
        model.zero_grad()
        wait(device)

    repeats = all(map(torch.equal, gradients["eager again"], gradients["eager"]))
    timings = time_rounds({name: partial(run, way) for name, way in ways.items()}, max(3, num_steps // 5))
    reference, found = gradients["eager"], []
    for name, values in gradients.items():
        same = sum(torch.equal(a, b) for a, b in zip(values, reference, strict=True))
        largest = max(float((a - b).abs().max()) for a, b in zip(values, reference, strict=True))
        bits = f"{same} of {len(values)} gradients have eager's bits, largest difference {largest:.1e}"
        found.append((name, f"{1e3 * timings[name].fastest:.1f} ms; {bits}"))
    is_equal = all(map(torch.equal, gradients["graphpasses, aot_eager"], reference))
    return is_equal or not repeats, found


def certificate_cost(device: str, num_steps: int) -> Found:
    """What a proof takes, beside the capture and the passes; a wrong graph must not be proved."""
    with world(device):
        model, (tokens,) = build(device, num_layers=12), batches(device, 1)
        start = time.perf_counter()
        step = gp.capture_train_step(loss_fn, model, tokens)
        capture = time.perf_counter() - start
        start = time.perf_counter()
        rewritten = gp.default_pipeline().run(step, prove=False)
        passes = time.perf_counter() - start
        start = time.perf_counter()
        certificate = gp.prove(step, rewritten)
        proof = time.perf_counter() - start
        wrong = rewritten.copy()
        break_it(wrong)
        try:
            gp.prove(step, wrong)
            refused = "proved"
        except gp.GraphPassesError as error:
            refused = f"refused: {str(error).splitlines()[0][:120]}"
    found = [
        ("nodes", f"{len(step.graph.nodes):,}"),
        ("capture, with its comparison with eager", f"{capture:.2f} s"),
        ("passes", f"{passes:.2f} s"),
        ("proof", f"{proof:.2f} s: {certificate.summary}"),
        ("control, another GELU", refused),
    ]
    return not certificate.unproved and refused.startswith("refused"), found


def locate_cost(device: str, num_steps: int) -> Found:
    """What it takes to find the operator at which a step parts from eager; nothing in a right step."""
    with world(device):
        model, (tokens,) = build(device), batches(device, 1)
        step = captured(model, tokens)
        start = time.perf_counter()
        right = locate_step(step, loss_fn, tokens)
        seconds = time.perf_counter() - start
        break_it(step)
        start = time.perf_counter()
        wrong = locate_step(step, loss_fn, tokens)
        again = time.perf_counter() - start
    node = None if wrong.difference is None or wrong.difference.b is None else wrong.difference.b.node
    found = [
        (
            "a right step",
            f"{'no difference' if right.difference is None else 'a difference'}, {seconds:.2f} s",
        ),
        ("control, another GELU", f"found at node {node!r}, {again:.2f} s"),
    ]
    return right.difference is None and node is not None and node.startswith("gelu"), found


def break_it(step: gp.TrainGraph) -> None:
    """Makes the first GELU of a step another one."""
    node = step.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)[0]
    node.kwargs = {"approximate": "tanh"}
    step.module.recompile()
