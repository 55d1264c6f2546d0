"""The ``torch.compile`` backend ``graphpasses``, and :func:`compile`, its typed form."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import fx, nn

from graphpasses._torch.aot_autograd import Stages, compile_aot_eager, compile_inductor, operators_of_eager
from graphpasses._torch.compile_backend import Backend
from graphpasses._torch.dynamo import attributes_in_graphs, guard_condition, nothing_made_for_logs, sizes_in_graphs
from graphpasses._torch.fake_mode import strides_of_kernels
from graphpasses._torch.module_hooks import global_hook_ids, hook_ids
from graphpasses._torch.symbols import UNDECIDED
from graphpasses._torch.written_inputs import written_by_checkpointed
from graphpasses.analysis.backward import backward_nodes
from graphpasses.analysis.effects import launches_collective
from graphpasses.analysis.uses import check_added_one_by_one
from graphpasses.capture.autocast_casts import autocasts_around, cast_once, check_cast_once, find_cast
from graphpasses.capture.compile_options import CompileOptions, Inner
from graphpasses.capture.compile_report import CompileReport
from graphpasses.capture.compiled_call import CompiledCall, running
from graphpasses.capture.compiled_gradients import CompiledGradients, copy_held, find_views_returned
from graphpasses.capture.compiled_graphs import read_aot_graph, read_model_graph
from graphpasses.capture.formulas import give_eagers_formulas
from graphpasses.capture.late_updates import LateUpdates, compile_whole
from graphpasses.capture.returned_views import ReturnedViews, take_views_out
from graphpasses.capture.traced_strides import runner
from graphpasses.capture.written_memory import WrittenMemory
from graphpasses.embedding.backward_checks import check_lookups
from graphpasses.embedding.torchrec.eager_parts import check_pipeline
from graphpasses.embedding.torchrec.fake_kernels import fake_kernels_if_loaded
from graphpasses.errors import PipelineError, UnsupportedError
from graphpasses.graph import Stage
from graphpasses.graph.nodes import source_line
from graphpasses.ops.autograd_functions import alias_tensors
from graphpasses.passes.runner import Graph, Pipeline


def compile(
    model: Callable[..., Any],
    *,
    pipeline: Pipeline | None = None,
    inner: Inner = "inductor",
    fuse: bool = False,
    disable: Collection[str] = (),
    report: CompileReport | Path | str | None = None,
    prove: bool | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Any:
    """Compiles a model with ``torch.compile`` and graphpasses' passes.

    The same as ``torch.compile(model, backend="graphpasses", options={...})``, which needs no import. TorchRec models
    need no preparation: what makes them one graph is set during the call and undone after it.

    Args:
        model: a module, or a function that calls modules.
        pipeline: the passes; None for :func:`~graphpasses.passes.recommender_pipeline`.
        inner: what compiles the rewritten graphs: ``"inductor"``, or ``"aot_eager"``, which runs them operator by
            operator and so keeps eager's bits in dense layers, too.
        fuse: compile groups of operators whose bits are fixed as one kernel each, with ``inner="aot_eager"``: the
            bits stay, see :class:`~graphpasses.passes.FuseExactly`.
        disable: names of passes to leave out.
        report: a :class:`~graphpasses.CompileReport` to fill, or a file to write it to.
        prove: whether each rewritten graph is proved to have the bits of the one it was made from, as
            :meth:`Pipeline.run` has it.
        fullgraph: raise where the model cannot be one graph, as ``torch.compile`` does.
        dynamic: as ``torch.compile`` has it.

    Returns:
        What ``torch.compile`` returns: a module for a module, a function for a function.

    Raises:
        PipelineError: an option is unknown or has a wrong value.
        UnknownPassError: ``disable`` names a pass that the pipeline does not have.
        ProofError: (in the first call) a pass changes bits.

    Example:
        >>> import graphpasses as gp
        >>> model = torch.nn.Linear(4, 1)
        >>> compiled = gp.compile(model, inner="aot_eager")
        >>> bool((compiled(torch.ones(2, 4)) == model(torch.ones(2, 4))).all())
        True
    """
    options: dict[str, Any] = {"inner": inner, "fuse": fuse, "disable": disable, "report": report, "prove": prove}
    if pipeline is not None:
        options["pipeline"] = pipeline
    return torch.compile(model, backend=graphpasses, options=options, fullgraph=fullgraph, dynamic=dynamic)


def _wrap(root: Any, compiled: Callable[..., Any], keywords: Mapping[str, Any]) -> Callable[..., Any]:
    if keywords.get("mode") is not None:
        raise PipelineError(
            f"backend 'graphpasses' has no mode={keywords['mode']!r}; what modes of Inductor set can be set in "
            "torch._inductor.config"
        )
    run = CompiledCall(CompileOptions.of(keywords.get("options")), root, compiled)

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    return call


@contextmanager
def _while_tracing() -> Iterator[None]:
    if (call := running().call) is not None:
        call.check_reducers()
    with fake_kernels_if_loaded(), nothing_made_for_logs(), sizes_in_graphs(), ExitStack() as stack:
        if call is not None and call.options.keeps_bits:
            stack.enter_context(strides_of_kernels())
            stack.enter_context(attributes_in_graphs())
            stack.enter_context(operators_of_eager(call.report.note))
        yield


@partial(Backend, wrap=_wrap, while_tracing=_while_tracing, when_recorded=check_pipeline)
def graphpasses(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend itself, which the entry point ``torch_dynamo_backends`` names; returns the compiled graph.

    Dynamo traced ``module`` and made the fake ``inputs``; for ``options`` see :class:`CompileOptions`.
    """
    call = running().call or CompiledCall(CompileOptions.of(options), nn.Module(), module)
    return _compile(module, inputs, call)


def _compile(module: fx.GraphModule, inputs: Sequence[Any], of: CompiledCall) -> Callable[..., Any]:
    options, model, remembered, report = of.options, of.model, of.remembered, of.report
    number, keeps_bits = report.num_graphs, options.keeps_bits
    report.num_graphs += 1

    def run(graph: Graph) -> Graph:
        result = options.pipeline.at(graph.stage).run(graph, graph_diff=report.graph_diff, prove=options.prove)
        assert result.report is not None
        report.add(number, graph.stage, result.report)
        return result

    _guard_hooks(module, model)
    casts = cast_once(module)
    captured = read_model_graph(module, model, remembered, running().place)
    memory = WrittenMemory(captured)
    communicates = any(map(launches_collective, captured.graph.nodes))
    check_lookups(captured)
    views = ReturnedViews()
    if keeps_bits:
        check_added_one_by_one(captured)
        captured, views = take_views_out(captured)
        inputs = [*inputs, *views.fakes]
    rewritten = run(captured)
    kept = [
        index
        for index, node in enumerate(rewritten.placeholders)
        if node.users or isinstance(node.meta.get("val"), torch.SymInt)  # a symbol may be part of other sizes
    ]
    late = LateUpdates(next(nn.Module.parameters(model)).device) if communicates and of.reduces_gradients else None
    if late is not None:
        rewritten.add_input(late.empty, "the end of the gradients")
        kept.append(len(rewritten.inputs) - 1)
    rewritten.remove_inputs(set(range(len(rewritten.inputs))) - set(kept))
    read = partial(
        read_aot_graph,
        given=rewritten.inputs,
        model=ref(model),
        parameters=rewritten.parameters,
        identity=rewritten.identity,
        remembered=remembered,
        place=captured.place,
    )
    gradients = CompiledGradients(rewritten, keeps_bits=keeps_bits, reduced=of.reduces_gradients)
    around = autocasts_around()
    if keeps_bits and (several := find_views_returned(rewritten)) is not None:
        report.warn(several)

    def rewrite(stage: Stage, gm: fx.GraphModule) -> Callable[[fx.GraphModule], fx.GraphModule] | None:
        if stage is Stage.BACKWARD and gradients.is_rewritten:
            return None
        graph = read(gm, stage)
        if stage is Stage.JOINT and keeps_bits:  # Inductor would trace into the operator
            backward = backward_nodes(graph)
            gradients.cast = find_cast(filter(backward.__contains__, graph.graph.nodes), around)
            gradients.read(graph.graph)
            give_eagers_formulas(graph.graph, backward.__contains__)
            copy_held(graph.graph)
            names = dict(zip(graph.placeholders, graph.inputs, strict=True))
            if written := sorted(repr(names[node].fqn) for node in written_by_checkpointed(gm)):
                report.warn(
                    f"a checkpointed function writes {', '.join(written)}, which eager does again in backward, and "
                    "the compiled graph does not. Write it, as a BatchNorm does, outside of what is checkpointed"
                )
        made = run(graph)
        gm.graph = made.graph
        if stage is Stage.BACKWARD and keeps_bits and late is None:
            gradients.return_apart(gm.graph)
        return made.runs_as

    joint, forward, backward = (partial(rewrite, each) for each in (Stage.JOINT, Stage.FORWARD, Stage.BACKWARD))
    compile_backward = late.compile if late is not None else gradients.compile if keeps_bits else compile_whole
    stages = Stages(joint, forward, backward, fake_kernels_if_loaded, compile_backward)
    num_given = len(captured.inputs)
    given = [index for index in kept if index < num_given]
    added = [rewritten.live[index] for index in kept if index >= num_given][: None if late is None else -1]
    fakes = [inputs[index] for index in given] + [node.meta["val"] for node in rewritten.placeholders[len(given) :]]
    with _undecided_named(captured.graph):
        if keeps_bits:
            compiled = compile_aot_eager(rewritten.module, fakes, stages, partial(runner, note=report.warn))
        else:
            facts = "\n".join(map(repr, (options.pipeline.uuid(), *rewritten.inputs)))
            digest = hashlib.sha256(facts.encode()).hexdigest()
            compiled = compile_inductor(rewritten.module, fakes, stages, digest, keep_order=communicates)
    gradients.forget()
    compiled = of.in_order(compiled)
    checks, input_checks, backward_checks = rewritten.checks, rewritten.input_checks, rewritten.backward_checks
    cast_names = {index: captured.inputs[index].fqn for index in casts if keeps_bits}

    def call(*values: Any) -> Any:
        if communicates:
            running().place += 1
        for check in checks:
            check()
        memory.check(values)
        if views.fakes:
            values = (*values, *views.before(*values))
        whole = values
        for check_inputs in input_checks:
            check_inputs(values)
        if cast_names:
            check_cast_once({name: values[index] for index, name in cast_names.items()}, running().casts)
        last = () if late is None else (late.token(),)
        values = (*(values[index] for index in given), *added, *last)
        given_apart, taken = gradients.use(values)
        outputs = compiled(*given_apart)
        gradients.follow(outputs, given_apart, taken)
        outputs = views.among(outputs, whole)
        return _checked(outputs, backward_checks) if backward_checks else outputs

    return call


@contextmanager
def _undecided_named(graph: fx.Graph) -> Iterator[None]:
    """Says what to write where torch's formulas decide by a number that only running tells."""
    try:
        yield
    except UNDECIDED as error:
        what, read = str(error).partition("\n")[0], graph.find_nodes(op="call_method", target="item")
        lines = ", ".join(sorted({*map(source_line, read)})) or "an unknown line"
        raise UnsupportedError(
            f"a formula of torch decides by a number that only running tells ({what}), which the model reads at "
            f"{lines}: put torch.compiler.disable on the function that reads it, which breaks the graph there"
        ) from error


def _guard_hooks(graph: fx.GraphModule, model: nn.Module) -> None:
    """Has Dynamo, which looks at no hooks of modules, compile again where some came or went."""
    modules = [ref(module) for module in model.modules()]

    def ids() -> list[Any]:
        return [global_hook_ids(), *(hook_ids(each) for module in modules if (each := module()) is not None)]

    before = ids()
    for placeholder in graph.graph.find_nodes(op="placeholder"):
        if "grapharg" in placeholder.meta:
            guard_condition(placeholder, lambda: ids() == before, "the model's modules have the same hooks")
            return


def _checked(outputs: Sequence[Any], backward_checks: Sequence[Callable[[], Callable[..., None]]]) -> Any:
    """Lets the backward of what a compiled graph returned begin with checks."""
    trained = [i for i, each in enumerate(outputs) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not trained:
        return outputs
    checks = [begin() for begin in backward_checks]

    def check(gradients: Sequence[torch.Tensor | None]) -> None:
        given = dict(zip(trained, gradients, strict=True))
        for check_gradients in checks:
            check_gradients([given.get(index) for index in range(len(outputs))])

    aliases = alias_tensors(*(outputs[index] for index in trained), before_backward=check)
    changed = list(outputs)
    for index, alias in zip(trained, aliases, strict=True):
        changed[index] = alias
    return tuple(changed)
