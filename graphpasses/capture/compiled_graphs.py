"""Make a TrainGraph of each graph that torch.compile shows: the model's, the joint one, and its two halves."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import fx, nn

from graphpasses._torch import pytree
from graphpasses._torch.aot_values import describe_input, described_outputs, is_tangent
from graphpasses._torch.dynamo import live_inputs
from graphpasses._torch.storage import without_functorch
from graphpasses.capture.unrounded_gradients import keep_unrounded
from graphpasses.graph import DynamoGraph, GraphInput, GraphOutput, InputKind, OutputKind, Stage, TrainGraph
from graphpasses.graph.nodes import WAIT, argument
from graphpasses.graph.parameters import parameter_infos
from graphpasses.identity import IdentityMap

_SIZE = torch.ops.aten.sym_size.int


def read_model_graph(
    module: fx.GraphModule, model: nn.Module, remembered: dict[Hashable, Any], place: int = 0
) -> DynamoGraph:
    """Returns the graph that Dynamo traced as a ``DYNAMO`` graph; ``module`` is shared, not copied.

    ``remembered`` is what passes remember from one compilation of the model to the next; for ``place`` see
    :class:`~graphpasses.graph.TrainGraph`.
    """
    identity = IdentityMap.of(model)
    state: dict[int, tuple[InputKind, str]] = {}
    for path, owner in model.named_modules():
        for kind, members in ((InputKind.PARAMETER, owner._parameters), (InputKind.BUFFER, owner._buffers)):
            for name, tensor in members.items():
                if tensor is not None:
                    state.setdefault(id(tensor), (kind, f"{path}.{name}" if path else name))
    inputs, live = [], []
    for source, value in live_inputs(module):
        kind, fqn = state.get(id(value), (InputKind.VALUE, _path(source)))
        inputs.append(GraphInput(kind, identity.canonical(fqn) if kind is not InputKind.VALUE else fqn))
        live.append(value)
    traced = [each for each in module.modules() if isinstance(each, fx.GraphModule)]  # it calls those that it owns
    for node in itertools.chain.from_iterable(each.graph.nodes for each in traced):
        if "example_value" in node.meta:
            node.meta["val"] = pytree.tree_map(without_functorch, node.meta["example_value"])
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, Sequence)
    return DynamoGraph(
        module=module,
        inputs=tuple(inputs),
        outputs=tuple(GraphOutput(OutputKind.VALUE, f"output {index}") for index in range(len(outputs))),
        identity=identity,
        parameters=parameter_infos(model, identity),
        model=model,
        remembered=remembered,
        place=place,
        live=tuple(live),
    )


def read_aot_graph(
    module: fx.GraphModule, stage: Stage, given: Sequence[GraphInput], model: ref[nn.Module], **of_model: Any
) -> TrainGraph:
    """Returns a graph that AOTAutograd made of a ``DYNAMO`` graph; its signature is fixed.

    ``module`` is shared, not copied; ``given`` are the inputs of the ``DYNAMO`` graph, as AOTAutograd was given them,
    ``of_model`` what all graphs of a model share. The model may be gone where its backward is compiled later: Dynamo
    keeps what was compiled until it is.
    """
    _read_sizes_after_waits(module.graph)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        index, attr, text = describe_input(node)
        inputs.append(
            GraphInput(InputKind.TANGENT if is_tangent(node) else InputKind.VALUE, text)
            if index is None
            else GraphInput(given[index].kind, given[index].fqn, attr)
        )
    outputs = [
        GraphOutput(OutputKind.VALUE, each.text)
        if each.of is None or given[each.of].kind is not InputKind.PARAMETER
        else GraphOutput(OutputKind.GRADIENT, given[each.of].fqn, each.attr)
        for each in described_outputs(module.graph)
    ]
    graph = TrainGraph(
        module=module,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        model=nn.Module() if (found := model()) is None else found,  # whose length nobody asks for
        stage=stage,
        fixed_signature=True,
        **of_model,
    )
    if stage is Stage.JOINT:
        keep_unrounded(graph, graph.model)
    return graph


def _read_sizes_after_waits(graph: fx.Graph) -> None:
    """Lets a collective's wait be its only user: AOTAutograd reads sizes from the launch."""
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        launch = argument(wait)
        readers = [user for user in launch.users if user is not wait and user.target is _SIZE]
        if readers:
            launch.append(wait)
            for reader in readers:
                reader.replace_input_with(launch, wait)


def _path(source: str) -> str:
    """Returns a readable path: ``L['self']._modules['a']._buffers['b']`` is ``a.b``."""
    path = re.sub(r"\._(?:modules|parameters|buffers)\[['\"]([^'\"]*)['\"]\]", r".\1", source)
    path = re.sub(r"^L\[['\"](\w+)['\"]\]", r"\1", path)
    return path.removeprefix("self.")
