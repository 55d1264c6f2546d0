"""What the pipeline refuses of a trainer, by name, and what it warns of."""

from __future__ import annotations

import dis
import inspect
from itertools import chain
from typing import Any

import torch
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.experiments.graph_trainer.graph_pp.runner import GraphPipelineRuntime
from torchtitan.tools.logging import logger

from graphpasses._torchtitan import wrapper_dtypes
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.layout import Layout
from graphpasses.graph import CapturedStep, TrainGraph

PIPELINE = "graphpasses"
FUSED = "graphpasses_fused"  # the same, whose exact operators are one kernel
_ELSE = "use another --compile.pass_pipeline"

# Options of graph_trainer that the pipeline does not go with, and why.
_UNSUPPORTED = {
    "enable_async_tensor_parallel": "its fused kernels add in another order than eager's collectives",
    "enable_autoparallel": "it shards otherwise than torchtitan's eager trainer, whose buckets the pipeline takes",
    "numerics_changing_optim": "it rounds otherwise than eager, as it says",
    "precompile_artifact_dir": "an artifact holds a graph that other passes have rewritten; the step must be traced",
}


def refuse_trainer(trainer: Any) -> None:
    """Refuses a trainer whose steps would not have eager's bits, before anything is traced."""
    asks = f"--compile.pass_pipeline {PIPELINE} would do nothing:"
    mode = trainer.config.compile.mode
    if mode != "aot_fx_trace":
        raise UnsupportedError(
            f"{asks} graph_trainer runs pipelines with --compile.mode aot_fx_trace, and the mode is {mode!r}. Use "
            "that mode, or leave the pipeline out"
        )
    refuse_options(trainer.config)
    if trainer.config.compile.pass_pipeline == FUSED:
        _refuse_unfused(trainer)
    _refuse_other_dtypes(trainer)
    if trainer.parallel_dims.pp_enabled:
        _refuse_stages(trainer)


def _refuse_unfused(trainer: Any) -> None:
    """Refuses to fuse exactly what Inductor fuses otherwise, and stages, which run as graphs of their own."""
    for option, is_on in (
        ("--compile.inductor_compilation full", trainer.config.compile.inductor_compilation == "full"),
        ("--parallelism.pipeline_parallel_degree above 1", trainer.parallel_dims.pp_enabled),
    ):
        if is_on:
            raise UnsupportedError(
                f"--compile.pass_pipeline {FUSED} does not go with {option}: leave that out, or use "
                f"--compile.pass_pipeline {PIPELINE}, which fuses nothing"
            )


def _refuse_stages(trainer: Any) -> None:
    """Refuses pipelines whose stages would not have eager's bits, or that torch cannot run."""
    if not isinstance(trainer.pp_schedule, GraphPipelineRuntime):
        raise UnsupportedError(
            f"--compile.pass_pipeline {PIPELINE} would do nothing: graph_trainer runs the stages of "
            f"{trainer.config.model_spec.name!r} without graphs. Train with --parallelism.pipeline_parallel_degree "
            "1, or leave the pipeline out"
        )
    if "arg_mbs" not in inspect.signature(trainer.pp_schedule.schedule.step).parameters:
        raise UnsupportedError(
            "torchtitan 0.3.0 gives a pipeline its microbatches one by one, which the schedules of torch "
            f"{torch.__version__} do not take; use torch 2.14, or train with --parallelism.pipeline_parallel_degree 1"
        )
    if trainer.parallel_dims.tp_enabled:
        raise UnsupportedError(
            "tensor parallelism with a pipeline: graph_trainer of torchtitan 0.3.0 cannot cut stages that return "
            "DTensors, with any pass pipeline ('Forward graph outputs require backward-only inputs'). Train with "
            "--parallelism.tensor_parallel_degree 1, with --parallelism.pipeline_parallel_degree 1, or eagerly"
        )
    compile_config = trainer.config.compile
    for option, is_on in (
        ("ep_overlap.enabled", compile_config.ep_overlap.enabled),
        ("enable_fsdp_ag_rs_overlap", compile_config.enable_fsdp_ag_rs_overlap),
    ):
        if is_on:
            raise UnsupportedError(
                f"--compile.{option} with a pipeline: what it does to a stage before ours was not compared with "
                f"eager. Leave it out, train with --parallelism.pipeline_parallel_degree 1, or {_ELSE}"
            )
    if isinstance(trainer.loss_fn, ChunkedLossWrapper):
        _refuse_chunked_loss(trainer)


def _refuse_chunked_loss(trainer: Any) -> None:
    """A chunked loss frees the head's group in forward, and what splits backward then looks for other parameters."""
    whole = type(trainer.loss_fn.loss_fn).__name__
    orders = trainer.pp_schedule.schedule.pipeline_order.values()
    kinds = {action.computation_type.name for order in orders for action in order if action is not None}
    if "BACKWARD_WEIGHT" in kinds:
        schedule = trainer.config.parallelism.pipeline_parallel_schedule
        raise UnsupportedError(
            f"with a chunked loss and the schedule {schedule!r}, which computes weights' gradients apart, "
            "torchtitan's eager trainer loses the gradient of the norm before lm_head; graph_trainer has it, and "
            "trains otherwise. Use --parallelism.pipeline_parallel_schedule Interleaved1F1B, the loss "
            f"{whole} as a whole, or {_ELSE}"
        )
    if trainer.gradient_accumulation_steps > 1:
        raise UnsupportedError(
            f"a chunked loss with a pipeline and {trainer.gradient_accumulation_steps} accumulation steps: eager "
            "adds lm_head's reduced gradient to .grad with each microbatch, graph_trainer with each step of the "
            "pipeline. Put all samples into one (--training.global_batch_size and local_batch_size), use the loss "
            f"{whole} as a whole, or {_ELSE}"
        )


def refuse_step(trainer: Any, step: TrainGraph, expected_layout: Layout) -> None:
    """Refuses a step that is not what torchtitan's eager trainer computes, whatever passes do to it."""
    _refuse_lost_gradients(trainer)
    if isinstance(step, CapturedStep):  # with a pipeline the trainers call the loss alike
        _refuse_other_loss(trainer.loss_fn, step)
    _refuse_other_shards(step, expected_layout)


def refuse_options(config: Any) -> None:
    """Refuses options of graph_trainer whose passes do not go with ours."""
    for option, why in _UNSUPPORTED.items():
        if getattr(config.compile, option):
            raise UnsupportedError(
                f"--compile.{option} does not go with --compile.pass_pipeline {PIPELINE}: {why}. Leave that option "
                f"out, or {_ELSE}"
            )


def warn_of_options(config: Any) -> None:
    """Logs which options leave bits to others."""
    if not config.compile.enable_passes:
        logger.warning(
            f"--compile.enable_passes False: the pipeline {PIPELINE} does nothing, and the step runs as it was "
            "traced: nothing is proved, and where weights are tied or rings reorder it has other bits than eager's"
        )
    if config.compile.enable_fsdp_dense_region_overlap:
        logger.warning(
            "--compile.enable_fsdp_dense_region_overlap moves the buckets of torchtitan's own bucketing, which those "
            f"of the pipeline {PIPELINE} replace: collectives are launched where its prefetch-collectives puts them"
        )
    if config.compile.inductor_compilation == "full":
        logger.warning(
            f"--compile.inductor_compilation full: Inductor compiles the whole graph that the pipeline {PIPELINE} "
            "leaves, and may round otherwise than eager; what is proved is the graph that it is given"
        )


def _refuse_lost_gradients(trainer: Any) -> None:
    """DTensor's ``local_map`` waits for what tensor parallelism gathers with ``AsyncCollectiveTensor.wait``.

    Autograd does not see that, and eager's routed experts give no gradient to their input. A trace has no such
    tensors, and has the gradient.
    """
    dims, parallelism = trainer.parallel_dims, trainer.config.parallelism
    is_gathered = dims.tp_enabled and not dims.ep_enabled and parallelism.enable_sequence_parallel
    experts = [
        name
        for part in trainer.model_parts
        for name, each in part.named_modules()
        if hasattr(each, "token_dispatcher")
    ]
    if is_gathered and experts:
        raise UnsupportedError(
            f"torchtitan's eager trainer loses the gradient of what {experts[0]!r} is given, since tensor "
            "parallelism gathers it out of autograd's sight (local_map); graph_trainer's trace has it, and trains "
            "otherwise. Use expert parallelism (--parallelism.expert_parallel_degree), train without tensor "
            "parallelism, or use another --compile.pass_pipeline"
        )


def _refuse_other_dtypes(trainer: Any) -> None:
    """SimpleFSDP keeps a class for each kind of module, with the dtypes of the first model that had one."""
    training = trainer.config.training
    names = training.mixed_precision_param, training.mixed_precision_reduce
    expected = [TORCH_DTYPE_MAP[name] for name in names]
    for fqn, *dtypes in chain.from_iterable(map(wrapper_dtypes, trainer.model_parts)):
        if dtypes != expected:
            raise UnsupportedError(
                f"SimpleFSDP gathers {fqn!r} in {dtypes[0]} and reduces its gradient in {dtypes[1]}, as for an "
                "earlier model of this process, whose classes it keeps; --training.mixed_precision_param and "
                f"mixed_precision_reduce are {expected[0]} and {expected[1]}. Make one trainer in a process, or "
                "import graphpasses.integrations.torchtitan.pass_pipeline before the first"
            )


def _refuse_other_loss(loss: Any, step: CapturedStep) -> None:
    """torchtitan's eager trainer gives a loss the batch's positions, graph_trainer does not."""
    paths = (path for path in step.batch_structure.paths if path.endswith("['positions']"))
    if next(paths, None) is None:
        return
    while isinstance(loss, ChunkedLossWrapper):  # which gives all on
        loss = loss.loss_fn
    if _reads_positions(type(loss).__call__):
        raise UnsupportedError(
            f"the loss {type(loss).__name__} may read the batch's positions, which torchtitan's eager trainer "
            "gives it and graph_trainer does not: they would train otherwise. Let it take none (and no **kwargs "
            f"that it reads), or {_ELSE}"
        )


def _reads_positions(call: Any) -> bool:
    """Whether a function has a parameter of this name, or reads others by ``**``."""
    parameters = inspect.signature(call).parameters.values()
    if any(parameter.name == "positions" for parameter in parameters):
        return True
    rest = {parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD}
    instructions = dis.get_instructions(call)
    return any(each.argval in rest and each.opname.startswith("LOAD") for each in instructions)


def _refuse_other_shards(step: TrainGraph, expected_layout: Layout) -> None:
    """FSDP2's trainer shards experts on dim 1 where there are more ranks than experts, SimpleFSDP's does not."""
    for entry in (entry for bucket in expected_layout.buckets for entry in bucket.entries):
        info = step.parameters[entry.fqn]
        if info.shard_dim != entry.shard_dim:
            raise UnsupportedError(
                f"torchtitan's eager trainer shards {entry.fqn!r} of shape {info.shape} as Shard({entry.shard_dim}), "
                f"graph_trainer as Shard({info.shard_dim}) over {len(info.shard_ranks)} ranks: each rank holds, and "
                "each byte of a bucket reduces, other elements. FSDP2's trainer does so with experts where there are "
                "more data-parallel ranks, replicas included, than experts: use no more, or another "
                "--compile.pass_pipeline"
            )
