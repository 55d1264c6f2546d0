"""The passes inside torchtitan's graph_trainer: ``--compile.pass_pipeline graphpasses``.

Importing this module registers the pipeline; ``python -m graphpasses.commands.train_torchtitan`` runs
``torchtitan.train`` with it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx
from torchtitan.experiments.graph_trainer import passes as titan
from torchtitan.experiments.graph_trainer.registry import register_pass_pipeline, register_post_init_hook
from torchtitan.tools.logging import logger

from graphpasses.capture.traced_result import read_traced_result
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import TrainGraph
from graphpasses.graph.certificate import Certificate
from graphpasses.graph.pass_report import PassReport, PipelineReport
from graphpasses.integrations.torchtitan.buckets import ON_REWRITTEN, eager_buckets
from graphpasses.passes import default_pipeline
from graphpasses.proof.prove import prove_as

__all__ = ["PIPELINE", "graph_passes"]

PIPELINE = "graphpasses"

# Ours in place of torchtitan's deduplicate_fsdp_unshard_chains, bucketing and reordering.
_BEFORE_MEMORY_POLICY = ("deduplicate-shared", "coalesce-grad-reductions")

# Options of graph_trainer whose passes work on its own buckets, on a graph that they already rewrote, or round.
_UNSUPPORTED = (
    "enable_fsdp_ag_rs_overlap",
    "enable_fsdp_dense_region_overlap",
    "enable_async_tensor_parallel",
    "enable_autoparallel",
    "numerics_changing_optim",
    "ep_overlap.enabled",
    "precompile_artifact_dir",
)

_trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@register_post_init_hook(PIPELINE)  # type: ignore[untyped-decorator]
def _remember(trainer: Any) -> None:
    """The pipeline is given the configuration alone, and needs the model.

    Raises:
        UnsupportedError: graph_trainer would ask for no pipeline, and train without a word; or an option asks for a
            pass that does not go with ours.
    """
    mode = trainer.config.compile.mode
    asks = f"--compile.pass_pipeline {PIPELINE} would do nothing:"
    if trainer.parallel_dims.pp_enabled:
        raise UnsupportedError(
            f"{asks} with pipeline parallelism graph_trainer compiles stages by itself, or not at all. Train with "
            "--parallelism.pipeline_parallel_degree 1, or leave the pipeline out"
        )
    if mode != "aot_fx_trace":
        raise UnsupportedError(
            f"{asks} graph_trainer runs pipelines with --compile.mode aot_fx_trace, and the mode is {mode!r}. Use "
            "that mode, or leave the pipeline out"
        )
    _refuse_options(trainer.config)
    _trainers[id(trainer.config)] = trainer


@register_pass_pipeline(PIPELINE)  # type: ignore[untyped-decorator]
def graph_passes(
    traced: Any, config: Any, *, parallel_dims: Any = None
) -> list[Callable[..., fx.GraphModule]]:
    """Returns the passes that graph_trainer runs over a traced step, in order.

    Args:
        traced: what graph_trainer traced.
        config: of the trainer.
        parallel_dims: its meshes.

    Returns:
        Our passes, with the buckets and the layout of the eager model; torchtitan's memory policy, offloading and
        rematerialization between them, Inductor and (on CUDA) CUDA graphs after them.

    Raises:
        UnsupportedError: see ``eager_buckets`` in ``buckets.py``; eager shards a parameter on another dim; or an
            option asks for a pass that does not go with ours.
        LayoutError: (from a pass) the graph's buckets are not eager's.
        ProofError: (from a pass) the rewritten step has other bits; ``--compile.disable_passes prove_pass`` proves
            nothing.
    """
    _refuse_options(config)
    _warn_of_inductor(config)
    trainer = _trainer_of(config)
    _refuse_lost_gradients(trainer)
    step = read_traced_result(traced, model=trainer.model_parts[0])
    plan, expected_layout = eager_buckets(trainer)
    _refuse_other_shards(step, expected_layout)
    pipeline = default_pipeline(plan, expected_layout=expected_layout)
    reports: list[PassReport] = []
    certificates: list[Certificate] = []
    on_rewritten = getattr(trainer, ON_REWRITTEN, None)
    ours = {p.name: p.as_function(step, reports, excerpts=on_rewritten is not None) for p in pipeline.passes}
    passes: list[Callable[..., fx.GraphModule]] = [
        titan.eliminate_dead_code_pass,
        *(ours.pop(name) for name in _BEFORE_MEMORY_POLICY),
        functools.partial(titan.tag_with_memory_policy_pass, config=config),
        functools.partial(
            titan.apply_cpu_offload_pass,
            prefetch_lookahead=config.compile.cpu_offload_prefetch_n_layers,
            defer_n_layers=config.compile.cpu_offload_defer_n_layers,
        ),
        titan.selective_activation_remat_pass,
        *ours.values(),
        functools.partial(
            prove_pass,
            original=step.copy(),
            step=step,
            layout=None if config.compile.disable_passes else expected_layout,
            certificates=certificates,
        ),
        functools.partial(
            _report_pass, step=step, reports=reports, certificates=certificates, on_rewritten=on_rewritten
        ),
        functools.partial(_order_pass, step=step, plan=plan),
        functools.partial(_finish_pass, traced=traced),
        titan.canonicalize_graph_pass,  # not earlier: ours know a captured step by its views
    ]
    has_cuda_graphs = trainer.device.type == "cuda" and "cudagraph_pass" not in config.compile.disable_passes
    passes += titan.final_inductor_compile_passes(config.compile, use_cudagraph=has_cuda_graphs)
    if trainer.device.type == "cuda":
        passes.append(
            functools.partial(
                titan.cudagraph_pass,
                static_input_indices=list(range(traced.num_static_inputs)),
                tensor_input_indices=traced.tensor_input_indices,
            )
        )
    names = [getattr(p, "func", p).__name__ for p in passes]
    for name in config.compile.disable_passes:
        if name not in names:
            logger.warning(
                f"--compile.disable_passes: unknown pass {name!r}; this pipeline has {', '.join(names)}"
            )
    return passes


def _refuse_options(config: Any) -> None:
    for option in _UNSUPPORTED:
        if operator.attrgetter(option)(config.compile):
            raise UnsupportedError(
                f"--compile.{option} does not go with --compile.pass_pipeline {PIPELINE}; leave one of them out"
            )


def _warn_of_inductor(config: Any) -> None:
    if config.compile.inductor_compilation == "full":
        logger.warning(
            f"--compile.inductor_compilation full: Inductor compiles the whole graph that the pipeline {PIPELINE} "
            "leaves, and may round otherwise than eager; what is proved is the graph that it is given"
        )


def _trainer_of(config: Any) -> Any:
    trainer = _trainers.get(id(config))
    if trainer is None:
        raise UnsupportedError(
            f"the pipeline {PIPELINE} needs the trainer whose step it rewrites, and no GraphTrainer was made of this "
            "configuration since graphpasses.integrations.torchtitan.pass_pipeline was imported; import it first, "
            "and do not precompile"
        )
    return trainer


def _refuse_lost_gradients(trainer: Any) -> None:
    """DTensor's ``local_map`` waits for what tensor parallelism gathers with ``AsyncCollectiveTensor.wait``.

    Autograd does not see that, and eager's routed experts give no gradient to their input. A trace has no such
    tensors, and has the gradient.
    """
    dims, parallelism = trainer.parallel_dims, trainer.config.parallelism
    is_gathered = dims.tp_enabled and not dims.ep_enabled and parallelism.enable_sequence_parallel
    experts = [
        name for name, each in trainer.model_parts[0].named_modules() if hasattr(each, "token_dispatcher")
    ]
    if is_gathered and experts:
        raise UnsupportedError(
            f"torchtitan's eager trainer loses the gradient of what {experts[0]!r} is given, since tensor "
            "parallelism gathers it out of autograd's sight (local_map); graph_trainer's trace has it, and trains "
            "otherwise. Use expert parallelism (--parallelism.expert_parallel_degree), train without tensor "
            "parallelism, or use another --compile.pass_pipeline"
        )


def _refuse_other_shards(step: TrainGraph, expected_layout: Layout) -> None:
    """FSDP2's trainer shards experts on dim 1 where there are more ranks than experts, SimpleFSDP's does not."""
    for entry in (entry for bucket in expected_layout.buckets for entry in bucket.entries):
        info = step.parameters[entry.fqn]
        if info.shard_dim not in (None, entry.shard_dim):
            raise UnsupportedError(
                f"torchtitan's eager trainer shards {entry.fqn!r} of shape {info.shape} as Shard({entry.shard_dim}), "
                f"graph_trainer as Shard({info.shard_dim}) over {len(info.shard_ranks)} ranks: each rank holds, and "
                "each byte of a bucket reduces, other elements. FSDP2's trainer does so with experts where there are "
                "more data-parallel ranks, replicas included, than experts: use no more, or another "
                "--compile.pass_pipeline"
            )


def prove_pass(
    gm: fx.GraphModule,
    example_inputs: object = None,
    *,
    original: TrainGraph,
    step: TrainGraph,
    layout: Layout | None,
    certificates: list[Certificate],
) -> fx.GraphModule:
    """Proves that the graph has the bits of the traced one, by torchtitan's passes and ours.

    Args:
        gm: the rewritten graph.
        example_inputs: not read.
        original: the traced step.
        step: what the inputs and outputs of ``gm`` are.
        layout: where eager reduces gradients; None if passes are disabled.
        certificates: gets what is proved.
    """
    rewritten = replace(step, module=gm)
    certificates.append(prove_as("the pipeline", original, rewritten, layout, is_planned=True))
    return gm


def _report_pass(
    gm: fx.GraphModule,
    example_inputs: object = None,
    *,
    step: TrainGraph,
    reports: list[PassReport],
    certificates: list[Certificate],
    on_rewritten: Callable[[PipelineReport, TrainGraph], None] | None,
) -> fx.GraphModule:
    """Logs the report of the passes, and calls who asked for it."""
    certificate = certificates[0] if certificates else None
    proof = "off (prove_pass is disabled)" if certificate is None else certificate.summary
    report = PipelineReport(tuple(reports), certificate=certificate, proof=proof)
    logger.info(f"graphpasses:\n{report}")
    if on_rewritten is not None:
        on_rewritten(report, replace(step, module=gm))
    return gm


def _order_pass(
    gm: fx.GraphModule, example_inputs: object = None, *, step: TrainGraph, plan: BucketPlan
) -> fx.GraphModule:
    """Orders a tied weight's gradients as eager adds them to ``.grad``: what ran in chunks is reduced first.

    torchtitan adds a step's outputs to ``.grad`` in the order of names. That is seen where gradients accumulate:
    (grad + chunks) + rest has other bits than (grad + rest) + chunks.
    """
    in_chunks = {fqn for entry in plan.entries if entry.accumulates for fqn in entry.fqns}
    node = gm.graph.output_node()
    values = list(node.args[0])  # type: ignore[arg-type]
    for slots in step.gradient_slots().values():
        first = sorted(slots, key=lambda slot: step.outputs[slot].fqn not in in_chunks)
        for slot, value in zip(slots, [values[slot] for slot in first], strict=True):
            values[slot] = value
    node.args = (values,)
    return gm


def _finish_pass(gm: fx.GraphModule, example_inputs: object = None, *, traced: Any) -> fx.GraphModule:
    """Gives torchtitan outputs that are None, where a tied weight's gradient is another name's output."""
    node = gm.graph.output_node()
    flat, layouts = iter(list(node.args[0])), traced.output_subclass_layouts  # type: ignore[arg-type]
    outputs: list[Any] = []
    for index in range(traced.num_flat_outputs):
        parts = [next(flat) for _ in range(layouts[index].num_tensors if index in layouts else 1)]
        if index in layouts and parts[0] is None:
            del layouts[index], parts[1:]
        outputs += parts
    node.args = (outputs,)
    gm.recompile()
    return gm
