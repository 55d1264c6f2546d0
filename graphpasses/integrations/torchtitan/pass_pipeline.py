"""The passes inside torchtitan's graph_trainer: ``--compile.pass_pipeline graphpasses``.

Importing this module registers the pipeline; ``python -m graphpasses.commands.train_torchtitan`` runs
``torchtitan.train`` with it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torchtitan.experiments.graph_trainer import passes as titan
from torchtitan.experiments.graph_trainer.registry import register_pass_pipeline, register_post_init_hook
from torchtitan.tools.logging import logger

from graphpasses._torchtitan import forget_wrapper_classes
from graphpasses.capture.traced_result import read_traced_result
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import TrainGraph
from graphpasses.graph.certificate import Certificate
from graphpasses.graph.pass_report import PassReport, PipelineReport
from graphpasses.integrations.torchtitan.buckets import ON_REWRITTEN, eager_buckets
from graphpasses.integrations.torchtitan.guards import TraceWatch, step_check
from graphpasses.integrations.torchtitan.refusals import (
    PIPELINE,
    refuse_options,
    refuse_step,
    refuse_trainer,
    warn_of_options,
)
from graphpasses.passes import default_pipeline
from graphpasses.proof.prove import prove_as

# Ours in place of torchtitan's deduplicate_fsdp_unshard_chains, bucketing and reordering.
_BEFORE_MEMORY_POLICY = ("deduplicate-shared", "coalesce-grad-reductions")

_trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@register_post_init_hook(PIPELINE)  # type: ignore[untyped-decorator]
def _remember(trainer: Any) -> None:
    """The pipeline is given the configuration alone, and needs the model."""
    refuse_trainer(trainer)
    warn_of_options(trainer.config)
    forget_wrapper_classes()  # or the next trainer's model would get this one's dtypes and mesh
    _trainers[id(trainer.config)] = trainer
    TraceWatch(trainer)


@register_pass_pipeline(PIPELINE)  # type: ignore[untyped-decorator]
def graph_passes(
    traced: Any, config: Any, *, parallel_dims: Any = None
) -> list[Callable[..., fx.GraphModule]]:
    """Returns the passes that graph_trainer runs over a step that it traced, in order.

    These are our passes, with the buckets and the layout of the eager model; torchtitan's memory policy, offloading
    and rematerialization between them, Inductor and (on CUDA) CUDA graphs after them; each call of the graph checks
    what it has built in.

    Raises:
        UnsupportedError: see ``eager_buckets`` in ``buckets.py``, and ``refusals.py``.
        LayoutError: (from a pass) the graph's buckets are not eager's.
        ProofError: (from a pass) the rewritten step has other bits; ``--compile.disable_passes prove_pass`` proves
            nothing.
    """
    refuse_options(config)
    trainer = _trainer_of(config)
    watch = TraceWatch.of(trainer)
    step = read_traced_result(traced, model=trainer.model_parts[0], snapshot=watch.snapshot)
    check = step_check(trainer, step)
    plan, expected_layout = eager_buckets(trainer)
    refuse_step(trainer, step, expected_layout)
    layout = None if config.compile.disable_passes else expected_layout
    on_rewritten = getattr(trainer, ON_REWRITTEN, None)
    own = _OwnPasses(step, step.copy(), traced, plan, layout, check, on_rewritten)
    ours = {
        p.name: p.as_function(step, own.reports, graph_diff=on_rewritten is not None)
        for p in default_pipeline(plan, expected_layout=expected_layout).passes
    }
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
        *own.after_rewriting,
        titan.canonicalize_graph_pass,  # not earlier: ours know a captured step by its views
    ]
    # Without CUDA graphs the trainer lets .grad be what the step returns, which a CUDA graph writes again.
    may_graph = trainer.device.type == "cuda" and not config.training.disable_cuda_graphs
    has_cuda_graphs = may_graph and "cudagraph_pass" not in config.compile.disable_passes
    passes += titan.final_inductor_compile_passes(config.compile, use_cudagraph=has_cuda_graphs)
    if may_graph:
        passes.append(
            functools.partial(
                titan.cudagraph_pass,
                static_input_indices=list(range(traced.num_static_inputs)),
                tensor_input_indices=traced.tensor_input_indices,
            )
        )
    passes.append(own.guard_pass)
    names = [getattr(p, "func", p).__name__ for p in passes]
    for name in config.compile.disable_passes:
        if name not in names:
            logger.warning(
                f"--compile.disable_passes: unknown pass {name!r}; this pipeline has {', '.join(names)}"
            )
    return passes


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

    step: TrainGraph  # says what inputs and outputs of a graph are
    original: TrainGraph  # as it was traced
    traced: Any  # what torchtitan made of it
    plan: BucketPlan
    layout: Layout | None  # that the rewritten step must have
    check: Callable[..., None]  # of each call of the graph
    on_rewritten: Callable[[PipelineReport, TrainGraph], None] | None
    reports: list[PassReport] = field(default_factory=list)
    certificate: Certificate | None = None

    @property
    def after_rewriting(self) -> tuple[Callable[..., fx.GraphModule], ...]:
        """Those that follow our other passes, in order."""
        return self.prove_pass, self._report_pass, self._order_pass, self._finish_pass

    def prove_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Proves that the graph has the bits of the traced one, by torchtitan's passes and ours."""
        rewritten = replace(self.step, module=gm)
        self.certificate = prove_as("the pipeline", self.original, rewritten, self.layout, is_planned=True)
        return gm

    def _report_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Logs the report of the passes, and calls who asked for it."""
        certificate = self.certificate
        proof = "off (prove_pass is disabled)" if certificate is None else certificate.summary
        report = PipelineReport(tuple(self.reports), certificate=certificate, proof=proof)
        logger.info(f"graphpasses:\n{report}")
        if self.on_rewritten is not None:
            self.on_rewritten(report, replace(self.step, module=gm))
        return gm

    def _order_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Orders a tied weight's gradients as eager adds them to ``.grad``: what ran in chunks is reduced first.

        torchtitan adds by names; where gradients accumulate, (grad + chunks) + rest has other bits than (grad + rest)
        + chunks.
        """
        in_chunks = {fqn for entry in self.plan.entries if entry.accumulates for fqn in entry.fqns}
        node = gm.graph.output_node()
        values = list(node.args[0])  # type: ignore[arg-type]
        for slots in self.step.gradient_slots().values():
            first = sorted(slots, key=lambda slot: self.step.outputs[slot].fqn not in in_chunks)
            for slot, value in zip(slots, [values[slot] for slot in first], strict=True):
                values[slot] = value
        node.args = (values,)
        return gm

    def _finish_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Gives torchtitan outputs that are None, where a tied weight's gradient is another name's output."""
        node = gm.graph.output_node()
        flat = iter(list(node.args[0]))  # type: ignore[arg-type]
        layouts = self.traced.output_subclass_layouts
        outputs: list[Any] = []
        for index in range(self.traced.num_flat_outputs):
            parts = [next(flat) for _ in range(layouts[index].num_tensors if index in layouts else 1)]
            if index in layouts and parts[0] is None:
                del layouts[index], parts[1:]
            outputs += parts
        node.args = (outputs,)
        gm.recompile()
        return gm

    def guard_pass(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Lets the graph check at each call that the model, the batch and settings are what it was traced with."""
        gm.register_forward_pre_hook(self.check)
        return gm
