"""The passes inside torchtitan's graph_trainer: ``--compile.pass_pipeline graphpasses``.

``graphpasses_fused`` is the same, and then runs groups of operators whose bits are fixed as one kernel each.
Importing this module registers both; ``python -m graphpasses.commands.train_torchtitan`` runs ``torchtitan.train``
with them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torchtitan.experiments.graph_trainer import passes as titan
from torchtitan.experiments.graph_trainer.registry import register_pass_pipeline, register_post_init_hook
from torchtitan.tools.logging import logger

from graphpasses._torch.fake_mode import real_tensors
from graphpasses._torchtitan import forget_wrapper_classes
from graphpasses.capture.traced_result import read_traced_result
from graphpasses.capture.unrounded_gradients import keep_unrounded
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.fusion.compiled_regions import compile_regions
from graphpasses.graph import CapturedStep, TrainGraph
from graphpasses.graph.certificate import Certificate, joined
from graphpasses.graph.nodes import EXACT_REGION
from graphpasses.graph.pass_report import PassReport, PipelineReport
from graphpasses.integrations.torchtitan.buckets import ON_REWRITTEN, replicated_as
from graphpasses.integrations.torchtitan.chunks import add_chunks_before_casts_pass, release_shared_nodes
from graphpasses.integrations.torchtitan.eager_model import eager_buckets
from graphpasses.integrations.torchtitan.guards import TraceWatch, step_check, without_checks
from graphpasses.integrations.torchtitan.refusals import (
    FUSED,
    PIPELINE,
    refuse_options,
    refuse_step,
    refuse_trainer,
    warn_of_options,
)
from graphpasses.integrations.torchtitan.stages import rewrite_stages
from graphpasses.integrations.torchtitan.their_passes import BUCKETING, Pass, inductor_passes, name_of, with_ours
from graphpasses.passes import FuseExactly, default_pipeline
from graphpasses.proof.prove import prove_as

_CONCRETE = "concretize_ep_chunk_symbolic_shapes_pass"

# Of torchtitan's passes those that compute otherwise, or in other process groups: with them the proof has two parts.
_ORIGINS = ("ep_overlap_chunk_pass", "isolate_ep_process_group_pass", "reassign_collective_pgs_pass")

_trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@register_post_init_hook(FUSED)  # type: ignore[untyped-decorator]
@register_post_init_hook(PIPELINE)  # type: ignore[untyped-decorator]
def _remember(trainer: Any) -> None:
    """The pipeline is given the configuration alone, and needs the model."""
    refuse_trainer(trainer)
    warn_of_options(trainer.config)
    forget_wrapper_classes()  # or the next trainer's model would get this one's dtypes and mesh
    if not trainer.parallel_dims.pp_enabled:
        _trainers[id(trainer.config)] = trainer
        TraceWatch(trainer)
    elif trainer.config.compile.enable_passes:
        rewrite_stages(trainer)


@register_pass_pipeline(FUSED)  # type: ignore[untyped-decorator]
@register_pass_pipeline(PIPELINE)  # type: ignore[untyped-decorator]
def graph_passes(traced: Any, config: Any, *, parallel_dims: Any = None) -> list[Callable[..., fx.GraphModule]]:
    """Returns the passes that graph_trainer runs over a step that it traced, in order.

    These are torchtitan's own, with ours, of the buckets and the layout of the eager model, in the places of its
    deduplication of unshards and of its bucketing; each call of the graph checks what it has built in.
    ``--compile.disable_passes prove_pass`` proves nothing.
    """
    refuse_options(config)
    trainer = _trainer_of(config)
    watch = TraceWatch.of(trainer)
    step = read_traced_result(traced, model=trainer.model_parts[0], snapshot=watch.snapshot)
    ((plan, expected_layout),) = eager_buckets(trainer)
    step.parameters = replicated_as(step, expected_layout)
    keep_unrounded(step, step.model)  # of those that were told only now to be reduced
    refuse_step(trainer, step, expected_layout)
    layout = None if config.compile.disable_passes else expected_layout
    on_rewritten = getattr(trainer, ON_REWRITTEN, None)
    fuse = config.compile.pass_pipeline == FUSED
    own = _OwnPasses(trainer, step, without_checks(step), traced, plan, layout, on_rewritten)
    ours = {
        p.name: p.as_function(step, own.reports, graph_diff=on_rewritten is not None)
        for p in default_pipeline(plan, expected_layout=expected_layout, fuse=fuse).passes
    }
    theirs = titan.compile_time_passes(traced, config, parallel_dims=parallel_dims, include_inductor=False)
    passes = [*_with_ours(theirs, ours, own), *([ours[FuseExactly.name]] if fuse else [])]
    passes += [own.prove_pass, own.report_pass, own.finish_pass, *([own.compile_kernels_pass] if fuse else [])]
    passes.append(titan.canonicalize_graph_pass)  # not earlier: ours know a captured step by its views
    # Without CUDA graphs the trainer lets .grad be what the step returns, which a CUDA graph writes again.
    may_graph = trainer.device.type == "cuda" and not config.training.disable_cuda_graphs
    has_cuda_graphs = may_graph and "cudagraph_pass" not in config.compile.disable_passes
    passes += inductor_passes(config.compile, use_cudagraph=has_cuda_graphs)
    if may_graph:
        passes.append(
            functools.partial(
                titan.cudagraph_pass,
                static_input_indices=list(range(traced.num_static_inputs)),
                tensor_input_indices=traced.tensor_input_indices,
            )
        )
    passes.append(own.guard_pass)
    names = [*map(name_of, passes)]
    for name in config.compile.disable_passes:
        if name not in names:
            logger.warning(f"--compile.disable_passes: unknown pass {name!r}; this pipeline has {', '.join(names)}")
    return passes


def _with_ours(theirs: Sequence[Pass], ours: Mapping[str, Pass], own: _OwnPasses) -> Iterator[Pass]:
    """Yields torchtitan's passes, with ours for some, and marks where the proof's parts end and begin."""
    named = [(name_of(each), each) for each in theirs]
    names = [name for name, _ in named]
    if _CONCRETE in names:  # the scheduler asks for no sizes; ours are of those that the step is called with
        named.insert(names.index(BUCKETING), named.pop(names.index(_CONCRETE)))
    own.origins = tuple(name for name, _ in named if name in _ORIGINS)
    for name, each in named:
        if name == "ep_overlap_schedule_pass":
            yield own.release_shared_nodes_pass
        if own.origins and name == own.origins[0]:
            yield own.end_first_part_pass
        if own.origins and name == BUCKETING:
            yield own.begin_second_part_pass
        yield from with_ours(name, each, ours)
        if name == "ep_overlap_chunk_pass":
            yield add_chunks_before_casts_pass


def _trainer_of(config: Any) -> Any:
    trainer = _trainers.get(id(config))
    if trainer is None:
        raise UnsupportedError(
            f"the pipeline {PIPELINE} needs the trainer whose step it rewrites, and no GraphTrainer was made of this "
            "configuration since graphpasses.integrations.torchtitan.pass_pipeline was imported; import it first, "
            "and do not precompile"
        )
    return trainer


@dataclass
class _OwnPasses:
    """Passes that are no :class:`GraphPass`, and what they know of a step."""

    trainer: Any
    step: CapturedStep  # says what inputs and outputs of a graph are
    original: TrainGraph  # as it was traced, but for checks
    traced: Any  # what torchtitan made of it
    plan: BucketPlan
    layout: Layout | None  # that the rewritten step must have
    on_rewritten: Callable[[PipelineReport, TrainGraph], None] | None
    reports: list[PassReport] = field(default_factory=list)
    certificate: Certificate | None = None
    check: Callable[..., None] | None = None  # of each call of the graph
    origins: tuple[str, ...] = ()  # torchtitan's passes between the two parts of the proof
    first_part: tuple[TrainGraph, TrainGraph] | None = None  # the step as it was traced, and before these

    def end_first_part_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Keeps the graph as it is before a pass of torchtitan that computes otherwise."""
        self.first_part = self.original, replace(self.step, module=gm).copy()
        return gm

    def begin_second_part_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Keeps the graph that such passes made, as the origin of what follows."""
        self.original = without_checks(replace(self.step, module=gm))
        return gm

    def release_shared_nodes_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Lets torchtitan's scheduler of chunks move what is one chunk's alone."""
        release_shared_nodes(gm, [node for _, node in replace(self.step, module=gm).parameter_placeholders()])
        return gm

    def prove_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Proves that the graph has the bits of the traced one, by torchtitan's passes and ours."""
        rewritten = replace(self.step, module=gm)
        parts = [prove_as("the pipeline", self.original, rewritten, self.layout, is_planned=True)]
        if self.first_part is not None:
            parts.insert(0, prove_as(f"what is before {self.origins[0]}", *self.first_part, None))
        self.certificate = joined(parts)
        return gm

    def report_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Logs the report of the passes, and calls who asked for it."""
        certificate = self.certificate
        proof = "off (prove_pass is disabled)" if certificate is None else certificate.summary
        if self.origins:
            between = " and ".join(self.origins)
            proof += f". It has two parts; torchtitan's {between} between them may compute otherwise"
        report = PipelineReport(tuple(self.reports), certificate=certificate, proof=proof)
        logger.info(f"graphpasses:\n{report}")
        if self.on_rewritten is not None:
            self.on_rewritten(report, replace(self.step, module=gm))
        return gm

    def finish_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Gives torchtitan outputs that are None, where a tied weight's gradient is another name's output.

        It adds a tied weight's gradients by names. They are ordered as eager adds them to ``.grad``, what ran in
        chunks first: (grad + chunks) + rest has other bits than (grad + rest) + chunks.
        """
        in_chunks = {fqn for entry in self.plan.entries if entry.accumulates for fqn in entry.fqns}
        node = gm.graph.output_node()
        values = list(node.args[0])  # type: ignore[arg-type]
        for slots in self.step.gradient_slots().values():
            first = sorted(slots, key=lambda slot: self.step.outputs[slot].fqn not in in_chunks)
            for slot, value in zip(slots, [values[slot] for slot in first], strict=True):
                values[slot] = value
        flat, layouts = iter(values), self.traced.output_subclass_layouts
        outputs: list[Any] = []
        for index in range(self.traced.num_flat_outputs):
            parts = [next(flat) for _ in range(layouts[index].num_tensors if index in layouts else 1)]
            if index in layouts and parts[0] is None:
                del layouts[index], parts[1:]
            outputs += parts
        node.args = (outputs,)
        gm.recompile()
        self.check = step_check(self.trainer, replace(self.step, module=gm))
        return gm

    def compile_kernels_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Returns a graph that runs each group of exact operators as one kernel."""
        with real_tensors():
            return compile_regions(gm, self.step.remembered.setdefault(EXACT_REGION, {}))

    def guard_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Lets the graph check at each call that the model, the batch and settings are what it was traced with."""
        assert self.check is not None
        gm.register_forward_pre_hook(self.check)
        return gm
