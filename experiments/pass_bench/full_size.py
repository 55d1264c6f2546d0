"""Captures a full-size Llama 3's step on fake tensors, and rewrites it both ways."""

from __future__ import annotations

import functools
import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.commands.train_torchtitan_on_cpu import use_cpu
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import TrainGraph
from graphpasses.passes import default_pipeline

__all__ = ["Timing", "time_passes"]

NUM_RANKS, SEQ = 64, 512


@dataclass(frozen=True)
class Timing:
    """What one model took.

    Args:
        flavor: of Llama 3.
        num_parameters: of the model.
        num_nodes: of the captured graph.
        capture: seconds to trace the step.
        ours: seconds of the default pipeline, by pass; ``"whole"`` is all of it, copy and checks included.
        code: seconds in which the rewritten step's code is generated, once, when it is first called.
        theirs: seconds of torchtitan's passes, by pass; each generates code.
        memory: bytes that the pipeline holds at once at most, its copy of the graph and reports included.
    """

    flavor: str
    num_parameters: int
    num_nodes: int
    capture: float
    ours: dict[str, float]
    code: float
    theirs: dict[str, float]
    memory: int


def time_passes(flavor: str, num_rounds: int) -> Timing:
    """Times both pipelines on one captured step, in turns; of several rounds the fastest counts.

    Args:
        flavor: of torchtitan's Llama 3, e.g. ``"405B"``.
        num_rounds: how often ours run; theirs run once, since they take so long.
    """
    use_cpu("gloo")
    with fake_process_group(NUM_RANKS):
        start = time.perf_counter()
        captured, num_parameters = _capture(flavor)
        capture = time.perf_counter() - start
        plan = BucketPlan.per_block(captured.model)
        pipeline = default_pipeline(plan)
        best: dict[str, float] = {}
        for _ in range(num_rounds):
            gc.collect()
            gc.disable()  # as timeit does: a collection walks all of torch, whatever the pass
            start = time.perf_counter()
            step = pipeline.run(captured)
            whole = time.perf_counter() - start
            gc.enable()
            if not best or whole < best["whole"]:
                assert step.report is not None
                best = {**{report.name: report.seconds for report in step.report}, "whole": whole}
        start = time.perf_counter()
        _ = step.module.code
        code = time.perf_counter() - start
        tracemalloc.start()
        pipeline.run(captured)
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        theirs = _time_theirs(captured)
        return Timing(flavor, num_parameters, len(captured.graph.nodes), capture, best, code, theirs, memory)


def _capture(flavor: str) -> tuple[TrainGraph, int]:
    from torchtitan.experiments.graph_trainer.common_utils import (
        annotate_module_fqns,
        build_decoder_config_for_backend,
    )
    from torchtitan.models import llama3

    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("fsdp",))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_decoder_config_for_backend(llama3.llama3_configs[flavor], "sdpa").build()
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        model = simple_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        annotate_module_fqns(model)  # by which torchtitan's bucketing knows its modules
        tokens = torch.zeros(1, SEQ, dtype=torch.long)
    return capture_train_step(_loss_fn, model, tokens, tokens), num_parameters


def _loss_fn(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens, positions=torch.arange(SEQ).unsqueeze(0))
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _time_theirs(captured: TrainGraph) -> dict[str, float]:
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
    module = torch.fx.GraphModule(
        copy, copy.graph
    )  # as their tracer makes it: code is generated after every pass
    inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    seconds = {}
    gc.collect()
    gc.disable()
    for each in passes:
        name = getattr(each, "func", each).__name__
        start = time.perf_counter()
        module = each(module, inputs)
        seconds[name] = time.perf_counter() - start
    gc.enable()
    return seconds
