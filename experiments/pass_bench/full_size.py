"""Captures a full-size Llama 3's step on fake tensors, and rewrites it both ways."""

from __future__ import annotations

import functools
import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from experiments.harness.bench import time_rounds
from experiments.harness.pipeline_timing import PipelineTiming, time_pipeline
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.fx_graphs import generate_code
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.commands.train_torchtitan_on_cpu import use_cpu
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.gc_pause import paused_gc
from graphpasses.graph import TrainGraph
from graphpasses.passes import default_pipeline
from graphpasses.proof.prove import prove

__all__ = ["NUM_RANKS", "FullSizeTiming", "capture_llama3", "shard_fully", "shard_simply", "time_passes"]

NUM_RANKS, SEQ = 64, 512
_DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
T = TypeVar("T")


@dataclass(frozen=True)
class FullSizeTiming:
    """What one model took, in CPU seconds, which other work on the machine changes little.

    Args:
        flavor: of Llama 3.
        capture: to build SimpleFSDP's model and to trace its step.
        capture_fsdp2: the same of the FSDP2 model.
        first: of the default pipeline's first run in the process, and of generating what the rewritten step runs,
            once, when it is first called; Python's garbage collector is on, as it is when a process starts.
        theirs_first: of torchtitan's passes' first run likewise, by pass; each generates code.
        ours: the default pipeline's further runs, garbage collector off.
        code: generating its code likewise.
        theirs: torchtitan's passes likewise.
        floor: of a copy of the captured graph and its code, collector off: what any pipeline takes that leaves the
            captured graph as it is.
        memory: bytes that the pipeline holds at once at most, its copy of the graph and reports included.
        proof: of the first proof of the rewritten step, against the layout that it has.
        proof_memory: bytes that a proof holds at once at most.
    """

    flavor: str
    capture: float
    capture_fsdp2: float
    first: tuple[float, float]
    theirs_first: dict[str, float]
    ours: PipelineTiming
    code: float
    theirs: dict[str, float]
    floor: float
    memory: int
    proof: float
    proof_memory: int


def time_passes(flavor: str, num_rounds: int) -> FullSizeTiming:
    """Times both pipelines on one captured step.

    Args:
        flavor: of torchtitan's Llama 3, e.g. ``"405B"``.
        num_rounds: how often ours runs with the garbage collector off; theirs runs once, since it takes so long.
    """
    use_cpu("gloo")
    with fake_process_group(NUM_RANKS):
        capture_fsdp2 = _timed(capture_llama3, flavor, shard_fully)[0]
        capture, captured = _timed(capture_llama3, flavor, shard_simply)
        pipeline = default_pipeline(BucketPlan.per_block(captured.model))
        gc.collect()
        run = functools.partial(pipeline.run, captured, prove=False)  # the proof is timed by itself
        seconds, step = _timed(run)
        first = seconds, _timed(generate_code, step.module)[0]
        theirs_first = _time_theirs(captured, pause_gc=False)
        ours = time_pipeline(pipeline, captured, num_rounds, cpu_time=True)
        theirs = _time_theirs(captured, pause_gc=True)
        step = run()
        with paused_gc():
            code = _timed(generate_code, step.module)[0]
            floor = _timed(lambda: generate_code(captured.copy().module))[0]
        layout = graph_layout(step)
        with paused_gc():  # as in a pipeline
            proof, certificate = _timed(functools.partial(prove, layout=layout), captured, step)
        if not certificate:
            raise RuntimeError(f"the step of Llama 3 {flavor} is not proved\n{certificate}")
        memory = _peak(run)
        proof_memory = _peak(lambda: prove(captured, step, layout=layout))
        return FullSizeTiming(
            flavor,
            capture,
            capture_fsdp2,
            first,
            theirs_first,
            ours,
            code,
            theirs,
            floor,
            memory,
            proof,
            proof_memory,
        )


def _peak(function: Callable[[], object]) -> int:
    """Returns the bytes that a call holds at once at most."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _timed(function: Callable[..., T], *args: Any) -> tuple[float, T]:
    start = time.process_time()
    result = function(*args)
    return time.process_time() - start, result


def shard_simply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards a decoder of torchtitan's with SimpleFSDP."""
    from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns

    model = simple_fsdp(model, mesh, **_DTYPES)
    annotate_module_fqns(model)  # by which torchtitan's bucketing knows its modules
    return model


def shard_fully(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shards a decoder of torchtitan's with FSDP2, each layer and the rest."""
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**_DTYPES))
    return model


def capture_llama3(flavor: str, shard: Callable[[nn.Module, DeviceMesh], nn.Module], length: int = SEQ) -> TrainGraph:
    """Captures a step of torchtitan's Llama 3 on fake tensors; a process group of :data:`NUM_RANKS` must be there.

    Args:
        flavor: of the model, e.g. ``"8B"``.
        shard: how it is sharded.
        length: tokens of a rank's batch, one sequence.
    """
    from torchtitan.experiments.graph_trainer.common_utils import build_decoder_config_for_backend
    from torchtitan.models import llama3

    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("fsdp",))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_decoder_config_for_backend(llama3.llama3_configs[flavor], "sdpa").build()
        model = shard(model, mesh)
    tokens = torch.zeros(1, length, dtype=torch.long)
    return capture_train_step(_loss_fn, model, tokens, tokens)


def _loss_fn(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens, positions=torch.arange(tokens.shape[1]).unsqueeze(0))
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _time_theirs(captured: TrainGraph, *, pause_gc: bool) -> dict[str, float]:
    """torchtitan's passes for the same work, in the order of its default pipeline."""
    from torchtitan.experiments.graph_trainer import passes as titan
    from torchtitan.experiments.graph_trainer.common_utils import get_default_transformer_block_buckets

    num_layers = len(captured.model.layers)
    fqns = [item.fqn for item in captured.inputs if item.is_state]
    passes: Sequence[Callable[..., torch.fx.GraphModule]] = (
        titan.eliminate_dead_code_pass,
        titan.canonicalize_graph_pass,
        titan.deduplicate_fsdp_unshard_chains_pass,
        functools.partial(
            titan.joint_transformer_block_bucketing_reordering_pass,
            module_bucket_plans=get_default_transformer_block_buckets(
                num_layers,
                chunked_loss_enabled=False,
                moe_layer_ids=frozenset(),
                split_moe_expert_buckets=False,
            ),
            fsdp_param_module_order=titan.get_fsdp_param_module_order(fqns),
        ),
    )
    copy = captured.copy().module
    # As their tracer makes it: code is generated after every pass.
    module = torch.fx.GraphModule(copy, copy.graph)
    inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    seconds = {}
    gc.collect()
    for each in passes:

        def run(index: int, each: Callable[..., torch.fx.GraphModule] = each) -> None:
            nonlocal module
            module = each(module, inputs)

        name = getattr(each, "func", each).__name__
        seconds[name] = time_rounds({name: run}, 1, num_warm_ups=0, pause_gc=pause_gc, cpu_time=True)[name].first
    return seconds
