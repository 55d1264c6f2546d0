"""graph_trainer's pipelines: each stage's graphs get the buckets, and the sums of microbatches, of eager FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.experiments.graph_trainer import passes as titan
from torchtitan.experiments.graph_trainer.graph_pp.graph_builder import GraphTrainerStageGraphProvider
from torchtitan.experiments.graph_trainer.graph_pp.stage import GraphPipelineStage
from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer
from torchtitan.tools.logging import logger

from graphpasses._torchtitan import stage_builders, stage_graphs_with_hooks
from graphpasses.capture.traced_result import read_traced_stage
from graphpasses.graph import TrainGraph
from graphpasses.graph.certificate import joined
from graphpasses.graph.pass_report import PassReport, PipelineReport
from graphpasses.integrations.torchtitan.buckets import ON_REWRITTEN, buckets_of, has_head
from graphpasses.integrations.torchtitan.eager_model import eager_parts
from graphpasses.integrations.torchtitan.guards import StageWatch, without_checks
from graphpasses.integrations.torchtitan.refusals import PIPELINE, refuse_step
from graphpasses.integrations.torchtitan.stage_graphs import (
    cut_reductions,
    cut_unshards,
    joined_stage,
    mark_unreduced,
)
from graphpasses.integrations.torchtitan.stage_sums import HeadReductions, MicrobatchSums, head_reductions
from graphpasses.integrations.torchtitan.their_passes import inductor_passes, name_of, with_ours
from graphpasses.passes import default_pipeline
from graphpasses.proof.prove import prove_as

# A stage's parameters are gathered by a graph of their own, so that nothing is gathered again or ahead.
_NOT_OF_STAGES = ("reshard-after-forward", "prefetch-collectives", "update-in-backward")


def rewrite_stages(trainer: Any) -> None:
    """Lets a trainer's pipeline build each stage's graphs with our passes; raises where :func:`eager_parts` does."""
    eager = dict(zip(map(id, trainer.model_parts), eager_parts(trainer), strict=True))
    theirs = trainer.pp_schedule.graph_provider
    fields = {each.name: getattr(theirs, each.name) for each in dataclasses.fields(theirs)}
    trainer.pp_schedule.graph_provider = StageProvider(**fields, trainer=trainer, eager=eager)


class StageGraphs(stage_graphs_with_hooks()):  # type: ignore[misc]
    """A stage's graphs, which keep the sums of its microbatches."""

    def __init__(
        self, modules: Any, meta: Any, check: Callable[[list[Any]], None], is_first: bool, head: HeadReductions | None
    ) -> None:
        super().__init__(modules, meta)
        self.sums = MicrobatchSums()
        self.head = head
        self._check, self._is_first = check, is_first
        reduce = modules.reduce_grad
        inputs = [] if reduce is None else reduce.graph.find_nodes(op="placeholder")
        placeholders = {node.name: node.meta.get("val") for node in inputs}
        names = enumerate(meta.bw_no_fsdp_output_names[: meta.num_param_grad_values])
        found = {index: placeholders.get(name) for index, name in names}
        self._dtypes = {index: value.dtype for index, value in found.items() if isinstance(value, Tensor)}

    def before_forward(self, flat: list[Any]) -> None:
        """Checks the flat inputs of a microbatch."""
        self._check(flat)
        if self.head is not None:
            self.head.forward(self.sums)

    def after_backward(self, gradients: list[Any]) -> list[Any]:
        """Adds the gradients of a microbatch; they are all added here, and none is returned."""
        if self.head is not None:
            self.head.backward(gradients)
        self.sums.add(gradients)
        self.sums.post_backward(self._dtypes)
        return [None] * len(gradients)

    def backward_input(self, *arguments: Any, **options: Any) -> Any:
        """Returns the gradients of the stage's inputs; FSDP2's ``post_backward`` runs meanwhile."""
        if not self._is_first:  # whose inputs need no gradients in eager
            self.sums.post_backward(self._dtypes)
        return super().backward_input(*arguments, **options)

    def backward_weight(self, saved_values_for_backward_weight: tuple[Any, ...]) -> list[Any]:
        """Adds the gradients of the stage's weights, and returns none."""
        gradients = super().backward_weight(saved_values_for_backward_weight)
        self.sums.add(gradients)
        if self._is_first:
            self.sums.post_backward(self._dtypes)
        return [None] * len(gradients)

    def reduce_grads(self, unsharded_param_grads: list[Any], *, runtime_validate: bool = False) -> Any:
        """Reduces the sums, cast: what was not added to others is cast here, as FSDP2 does when it packs."""
        self.sums.post_backward(self._dtypes)
        sums = self.sums.take(range(len(unsharded_param_grads)))
        reduced = super().reduce_grads(sums, runtime_validate=runtime_validate)
        return reduced if self.head is None else self.head.add_to(reduced)

    def clear(self) -> None:
        """Forgets what a step that failed has left."""
        self.sums.clear()
        if self.head is not None:
            self.head.clear()


class StageProvider(GraphTrainerStageGraphProvider):  # type: ignore[misc]
    """Builds stages with our passes."""

    def __init__(self, *, trainer: Any, eager: dict[int, nn.Module], **fields: Any) -> None:
        super().__init__(**{name: value for name, value in fields.items() if not name.startswith("_")})
        self._trainer, self._eager = trainer, eager
        self._built: list[tuple[GraphPipelineStage, StageWatch]] = []

    def prepare_graphs(self, schedule: Any, ctx: Any, *, loss_kwargs: dict[str, Any]) -> Any:
        """Builds the graphs if they are not there; checks what they have built in if they are."""
        for stage, watch in self._built:
            watch.check(stage.submod)
            stage.graphs.clear()
        building = _Building(self._trainer, self._eager)
        others = {
            "minimal_fx_tracer": building.traced,
            "_apply_graph_pp_pre_partition_passes": building.rewrite,
            "split_forward_fsdp_collectives": cut_unshards,
            "split_backward_fsdp_collectives": building.cut,
            "GraphTrainerStageGraphs": building.bind,
            "final_inductor_compile_passes": inductor_passes,
        }
        with stage_builders(**others):
            graphs = super().prepare_graphs(schedule, ctx, loss_kwargs=loss_kwargs)
        self._built += building.built
        return graphs


class _Building:
    """Builds the stages of a rank, one after another: graph_trainer calls its methods in the order of the file."""

    def __init__(self, trainer: Any, eager: dict[int, nn.Module]) -> None:
        self.built: list[tuple[GraphPipelineStage, StageWatch]] = []
        self._trainer, self._eager = trainer, eager

    def traced(self, function: Callable[..., Any], *, module: Any) -> Callable[..., Any]:
        """Takes the place of ``minimal_fx_tracer``: what the trace reads is watched."""
        trace = minimal_fx_tracer(function, module=module)
        self._watch = StageWatch(module, self._trainer.loss_fn)

        def run(*arguments: Any) -> Any:
            with self._watch.watched():
                return trace(*arguments)

        return run

    def rewrite(self, stage: GraphPipelineStage, traced: Any, **_: Any) -> None:
        """Runs torchtitan's passes with ours over the trace of a stage."""
        config = self._trainer.config
        num_results = traced.output_spec.child(0).num_leaves
        graph = read_traced_stage(
            traced, model=stage.submod, num_results=num_results, num_tangents=0 if stage.is_last else num_results
        )
        self._stage, self._graph, self._original = stage, graph, without_checks(graph)
        eager = self._eager[id(stage.submod)]
        plan, self._layout = buckets_of(eager, config)
        refuse_step(self._trainer, graph, self._layout)
        self._reports: list[PassReport] = []
        wants_diff = getattr(self._trainer, ON_REWRITTEN, None) is not None
        ours = {
            each.name: each.as_function(graph, self._reports, graph_diff=wants_diff)
            for each in default_pipeline(plan, expected_layout=self._layout).passes
            if each.name not in _NOT_OF_STAGES
        }

        theirs = titan.compile_time_passes(
            traced, config, parallel_dims=self._trainer.parallel_dims, include_inductor=False
        )
        passes = [one for each in theirs for one in with_ours(name_of(each), each, ours)]
        first = passes.index(ours["bucket-fsdp-collectives"])

        def run(some: list[Callable[..., Any]]) -> None:
            examples = traced.example_inputs
            traced.gm = titan.apply_graph_passes(traced.gm, examples, some, compile_config=config.compile)

        run(passes[:first])
        marked = dataclasses.replace(graph, module=traced.gm)
        compute = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
        self._marked = mark_unreduced(marked, num_results, plan, compute)
        is_chunked = isinstance(self._trainer.loss_fn, ChunkedLossWrapper) and has_head(stage.submod)
        self._head = head_reductions(marked, eager, num_results) if is_chunked else None
        run([*passes[first:], titan.eliminate_dead_code_pass])

    def cut(self, module: fx.GraphModule, *, num_param_grads: int) -> Any:
        """Takes the place of ``split_backward_fsdp_collectives``."""
        apart = () if self._head is None else self._head.slots
        return cut_reductions(module, num_param_grads=num_param_grads, marked=self._marked, apart=apart)

    def bind(self, *, modules: Any, meta: Any) -> StageGraphs:
        """Takes the place of ``GraphTrainerStageGraphs``: proves what the graphs compute together."""
        stage, graph = self._stage, self._graph
        values = [node.meta.get("val") for node in graph.placeholders]
        num_state = sum(item.is_state for item in graph.inputs)
        num_tangents = 0 if meta.is_last_stage else meta.num_user_outputs
        check = self._watch.checks_inputs(values[num_state : len(values) - num_tangents], stage.stage_index)
        head = self._head
        graphs = StageGraphs(modules, meta, check, stage.is_first, head)
        apart = None if head is None else (head.slots, head.alone)
        variants = [False, True] if modules.bw_di is not None else [False]
        wholes = [
            dataclasses.replace(graph, module=joined_stage(graph, graphs, is_split=is_split, apart=apart))
            for is_split in variants
        ]
        self._report(wholes)
        self.built.append((stage, self._watch))
        return graphs

    def _report(self, wholes: list[TrainGraph]) -> None:
        disabled = self._trainer.config.compile.disable_passes
        certificate, proof = None, "off (prove_pass is disabled)"
        if "prove_pass" not in disabled:
            subject = f"the pipeline of stage {self._stage.stage_index}"
            layout = None if disabled else self._layout
            certificate = joined(
                [prove_as(subject, self._original, whole, layout, is_planned=True) for whole in wholes]
            )
            proof = certificate.summary
        report = PipelineReport(tuple(self._reports), certificate=certificate, proof=proof)
        logger.info(f"{PIPELINE}, stage {self._stage.stage_index}:\n{report}")
        if (on_rewritten := getattr(self._trainer, ON_REWRITTEN, None)) is not None:
            on_rewritten(report, wholes[0])
