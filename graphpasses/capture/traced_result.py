"""Read what each flat input and output of a traced step is, from torchtitan's tracer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch import pytree
from graphpasses._torch.fx_graphs import copy_graph, lazy_module
from graphpasses._torch.operator_facts import writes_first
from graphpasses._torch.schemas import out_of_place_view, returns_alias, writes_arguments
from graphpasses.analysis.effects import is_written
from graphpasses.analysis.parameter_collectives import added_uses
from graphpasses.capture.formulas import give_eagers_formulas
from graphpasses.capture.unrounded_gradients import keep_unrounded
from graphpasses.embedding.torchrec.batches import TORCHREC
from graphpasses.errors import CaptureError, UnsupportedError
from graphpasses.graph import CapturedStep, GraphInput, GraphOutput, InputKind, OutputKind, Stage, TrainGraph
from graphpasses.graph.accumulation import Cuts, Marks
from graphpasses.graph.batch_structure import BatchStructure
from graphpasses.graph.nodes import SAME_TENSOR_OPS, argument, reach
from graphpasses.graph.parameters import get_state, parameter_infos
from graphpasses.graph.returned import Returned
from graphpasses.identity import IdentityMap
from graphpasses.ops.rnn_layer import RNN_LAYER
from graphpasses.state.model import trained_state
from graphpasses.state.snapshot import Snapshot

if TYPE_CHECKING:
    from torchtitan.experiments.graph_trainer.make_fx_tracer import TracedResult

    from graphpasses._torch.step_tracer import TracedFunction


aten = torch.ops.aten


def read_traced_result(traced: TracedResult, *, model: nn.Module, snapshot: Snapshot | None = None) -> CapturedStep:
    """Makes a step of what torchtitan's ``minimal_fx_tracer`` has traced.

    The traced function must return the loss and then one gradient (or None) per trainable parameter, in the
    order of ``model.named_parameters(remove_duplicate=False)``, or of ``model.parameters()``, as torchtitan's
    graph_trainer does.

    Args:
        traced: what the tracer returned; its graph module is shared, not copied.
        model: the module that was traced.
        snapshot: what the graph has built in; None where nobody watched: the model's structure and the settings.

    Returns:
        The step. Its signature is marked fixed: passes keep every placeholder.

    Raises:
        CaptureError: the traced state or outputs do not fit the model.
        UnsupportedError: a parameter is sharded otherwise than evenly by FSDP over tensor parallelism, or an
            input is another tensor subclass than DTensor.

    Example:
        >>> import torch
        >>> from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer
        >>> model = torch.nn.Linear(4, 1)
        >>> def train(x):
        ...     loss = model(x).square().mean()
        ...     return [loss, *torch.autograd.grad(loss, list(model.parameters()))]
        >>> traced = minimal_fx_tracer(train, module=model)(torch.ones(2, 4))
        >>> read_traced_result(traced, model=model).gradient_slots()
        {'weight': [1], 'bias': [2]}
    """
    layouts = [traced.input_subclass_layouts.get(index) for index in range(len(traced.state_fqns))]
    num_state = sum(len(inner_attrs(layout, f"flat input {index}")) for index, layout in enumerate(layouts))
    num_leaves = traced.num_flat_inputs - len(traced.state_fqns)
    leaves = traced.example_inputs[num_state : num_state + num_leaves]
    structure = BatchStructure.of(pytree.tree_unflatten(leaves, traced.user_inputs_spec)[0], TORCHREC)
    paths = [f"batch leaf {index}" for index in range(len(leaves))]
    named = [*zip(paths, leaves, strict=True)]
    snapshot = Snapshot.of(model) if snapshot is None else snapshot
    return read_step(traced, model, structure, named, snapshot=snapshot, fixed_signature=True)


def read_step(
    traced: TracedFunction | TracedResult,
    model: nn.Module,
    batch_structure: BatchStructure,
    batch_leaves: Sequence[tuple[str, Any]],
    marks: Marks | None = None,
    left: Sequence[GraphOutput] = (),
    returned: Returned | None = None,
    **fields: Any,
) -> CapturedStep:
    """Makes a step of a trace; ``batch_leaves`` are paths and fake tensors or values, ``fields`` of the step.

    ``marks`` are the last values that the traced function returns: where it may be cut; before them come tensors that
    are ``left`` in modules, and those that ``loss_fn`` has ``returned`` beside the loss.
    """
    returned = returned or Returned()
    _make_views(traced.gm)
    _keep_rnn_layers(traced.gm)
    give_eagers_formulas(traced.gm.graph)
    identity = IdentityMap.of(model)
    kinds = [(InputKind.BATCH, path) for path, _ in batch_leaves]
    for index, (_, path) in enumerate(kinds, start=len(traced.state_fqns)):
        if traced.input_subclass_layouts.get(index) is not None:
            raise UnsupportedError(f"{path} is a tensor subclass; pass plain tensors in the batch")
    inputs = _inputs(traced, model, kinds)
    trained = trained_state(model)
    trainable = [fqn for fqn in traced.state_fqns if fqn in trained]
    cuts = None if marks is None else _take_marks(traced.gm, marks)
    num_others = len(left) + len(returned.computed) + (0 if marks is None else len(marks.names))
    num_returned = traced.num_flat_outputs - num_others
    if num_returned == 1 + len(unique := dict.fromkeys(map(identity.canonical, trainable))):
        trainable = list(unique)  # asked by model.parameters(), where ties still hold
    if num_returned != 1 + len(trainable):
        raise CaptureError(
            f"the traced step returns {num_returned} values; expected the loss and one gradient for "
            f"each of the {len(trainable)} trainable parameters (names of tied ones counted each)"
        )
    loss_attrs = inner_attrs(traced.output_subclass_layouts.get(0), "the loss")
    outputs = [GraphOutput(OutputKind.LOSS, attr=attr) for attr in loss_attrs]
    outputs += _gradients(traced, [(fqn, trained[fqn]) for fqn in trainable], first=1)
    outputs += left
    outputs += [GraphOutput(OutputKind.RETURNED, path) for path in returned.computed]

    described = _described(traced.gm, model, identity, inputs, outputs)
    placeholders = traced.gm.graph.find_nodes(op="placeholder")
    step = CapturedStep(
        module=traced.gm if marks is None else lazy_module(traced.gm, traced.gm.graph),
        batch_structure=batch_structure,
        batch_leaves=tuple(batch_leaves),
        written=frozenset(item.fqn for item, node in zip(inputs, placeholders, strict=True) if is_written(node)),
        cuts=None if cuts is None else replace(cuts, inputs=tuple(inputs), outputs=tuple(outputs)),
        returned=returned,
        **described,
        **fields,
    )
    _keep_one_total(step)
    keep_unrounded(step, model)
    step.module.recompile()
    return step


def read_traced_stage(traced: TracedResult, *, model: nn.Module, num_results: int, num_tangents: int) -> TrainGraph:
    """Makes a joint graph of what graph_trainer traces of a pipeline's stage.

    The traced function must return what the stage returns, then one gradient (or None) per trainable parameter, in
    the order of ``model.named_parameters(remove_duplicate=False)``, then those of the stage's inputs. Its signature
    is marked fixed.

    Args:
        traced: what the tracer returned; its graph module is shared, not copied.
        model: the stage's module.
        num_results: how many tensors the stage returns.
        num_tangents: how many of the last inputs are gradients of these.

    Raises:
        UnsupportedError: as :func:`read_traced_result`.
        CaptureError: as there.
    """
    _make_views(traced.gm)
    _keep_rnn_layers(traced.gm)
    num_state, num_inputs = len(traced.state_fqns), traced.num_flat_inputs
    names = [(InputKind.VALUE, f"input {index}") for index in range(num_inputs - num_state - num_tangents)]
    names += [(InputKind.TANGENT, f"gradient of result {index}") for index in range(num_tangents)]
    inputs = _inputs(traced, model, names)
    trained = [each for each in model.named_parameters(remove_duplicate=False) if each[1].requires_grad]

    def values(first: int, end: int) -> list[GraphOutput]:
        layouts = map(traced.output_subclass_layouts.get, range(first, end))
        attrs = (attr for layout in layouts for attr in inner_attrs(layout, "a result"))
        return [GraphOutput(OutputKind.VALUE, attr=attr) for attr in attrs]

    outputs = values(0, num_results) + _gradients(traced, trained, first=num_results)
    outputs += values(num_results + len(trained), traced.num_flat_outputs)
    described = _described(traced.gm, model, IdentityMap.of(model), inputs, outputs)
    graph = TrainGraph(module=traced.gm, stage=Stage.JOINT, fixed_signature=True, **described)
    keep_unrounded(graph, model)
    graph.module.recompile()
    return graph


def _inputs(
    traced: TracedFunction | TracedResult, model: nn.Module, others: Sequence[tuple[InputKind, str]]
) -> list[GraphInput]:
    """Describes the placeholders of a trace; ``others`` are kinds and names of the inputs that are no state."""
    parameters = dict(model.named_parameters(remove_duplicate=False)) | trained_state(model)
    kinds = []
    for fqn in traced.state_fqns:
        get_state(model, fqn)
        kinds.append((InputKind.PARAMETER if fqn in parameters else InputKind.BUFFER, fqn))
    inputs: list[GraphInput] = []
    for index, (kind, fqn) in enumerate([*kinds, *others]):
        attrs = inner_attrs(traced.input_subclass_layouts.get(index), f"flat input {index}")
        inputs.extend(GraphInput(kind, fqn, attr) for attr in attrs)
    return inputs


def _gradients(
    traced: TracedFunction | TracedResult, trained: Sequence[tuple[str, torch.Tensor]], first: int
) -> list[GraphOutput]:
    """Describes the outputs that are gradients of parameters, from the ``first`` of the traced function's on."""
    outputs: list[GraphOutput] = []
    for index, (fqn, parameter) in enumerate(trained, start=first):
        layout = traced.output_subclass_layouts.get(index)
        if layout is not None and layout.meta is not None and isinstance(parameter, DTensor):
            placements = layout.meta.ctx[0]
            if tuple(placements) != tuple(parameter.placements):
                raise UnsupportedError(
                    f"the gradient of {fqn!r} has placements {placements}, its parameter "
                    f"{parameter.placements}; the optimizer could not use it"
                )
        outputs.extend(GraphOutput(OutputKind.GRADIENT, fqn, attr) for attr in inner_attrs(layout, fqn))
    return outputs


def _described(
    module: fx.GraphModule,
    model: nn.Module,
    identity: IdentityMap,
    inputs: Sequence[GraphInput],
    outputs: Sequence[GraphOutput],
) -> dict[str, Any]:
    """Returns what describes a traced graph; raises if it has other inputs or outputs."""
    num_placeholders = len(module.graph.find_nodes(op="placeholder"))
    num_outputs = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
    if num_placeholders != len(inputs) or num_outputs != len(outputs):
        raise CaptureError(
            f"the traced graph has {num_placeholders} placeholders and {num_outputs} outputs; its metadata "
            f"describes {len(inputs)} and {len(outputs)}"
        )
    who = {"identity": identity, "parameters": parameter_infos(model, identity), "model": model}
    return {"inputs": tuple(inputs), "outputs": tuple(outputs), **who}


def _make_views(module: fx.GraphModule) -> None:
    """Lets operators that give their operand another shape in place, as ``squeeze_`` does, return a view instead.

    Who computed fake values again would change that of the operand. One without such a form stays, and one of a
    tensor from outside, whose shape the step changes.
    """
    for node in module.graph.nodes:
        view = out_of_place_view(node.target)
        if view is None or not _is_made_here(node):
            continue
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        node.target = view
        for user in [user for user in operand.users if user > node]:
            user.replace_input_with(operand, node)


def _keep_rnn_layers(module: fx.GraphModule) -> None:
    """Lets the kernel of an LSTM's layer see that gradients are on where it saw that in eager: what it keeps says."""
    for node in module.graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        kept = node.meta["val"][-1]
        if kept is not None and isinstance(kept.shape[0], int):  # torch's fake result, with gradients and without
            raise CaptureError(
                "the model has an LSTM that runs in oneDNN, and its tracer does not tell whether gradients are on, "
                "by which that rounds; turn oneDNN off in both runs, with torch.backends.mkldnn.set_flags(False)"
            )
        if kept is not None:
            node.target = RNN_LAYER


def _is_made_here(node: fx.Node) -> bool:
    """Whether the tensor that calls in place return is one that the step has made; False where that is not known."""
    while writes_first(node.target) and node.args:
        node = argument(node)
    is_another = writes_arguments(node.target) and returns_alias(node.target)  # of ``out=``
    return node.op == "call_function" and not is_another


def _sums(gradient: fx.Node) -> list[str]:
    """Returns the names of the nodes by which autograd's engine adds up the gradients of a parameter's uses."""
    while gradient.target in SAME_TENSOR_OPS:
        gradient = argument(gradient)
    uses = {*added_uses(gradient)}
    nodes = reach([gradient], lambda node: () if node in uses else node.all_input_nodes) - uses
    return [node.name for node in gradient.graph.nodes if node in nodes]


def _take_marks(module: fx.GraphModule, marks: Marks) -> Cuts | None:
    """Takes the marks of places out of a graph; returns it as it was with them. None if there are none."""
    if not marks.names:
        return None
    output = module.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    nodes = values[-len(marks.names) :]
    output.args = (values[: -len(nodes)],)
    marked = lazy_module(module, copy_graph(module.graph))
    places = dict(zip(marks.names, nodes, strict=True))
    added = {place: sums for place, node in places.items() if (sums := _sums(node))}
    for node in nodes:
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    names = {place: node.name for place, node in places.items()}
    return Cuts(marked, replace(marks, names=names, added=added))


def _keep_one_total(graph: TrainGraph) -> None:
    """Where the names of a tied plain tensor share one total gradient, leaves it to the first."""
    values = graph.output_values
    for slots in graph.gradient_slots().values():
        seen: set[object] = set()
        for slot in slots:
            if values[slot] is not None and values[slot] in seen:
                graph.set_output(slot, None)
            seen.add(values[slot])


def inner_attrs(layout: Any, what: str) -> tuple[str, ...]:
    """Returns the parts of a tensor that placeholders or outputs carry, one each.

    ``layout`` is torchtitan's, of a tensor subclass, or None for a plain tensor; ``what`` names the tensor in an
    error.
    """
    if layout is None:
        return ("",)
    if layout.meta.cls is not DTensor or any(meta is not None for _, meta in layout.meta.inner_metas.values()):
        raise UnsupportedError(f"{what} is a {layout.meta.cls.__name__}; only plain tensors and DTensors are")
    return tuple(layout.meta.attrs)
