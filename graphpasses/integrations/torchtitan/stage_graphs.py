"""The graphs of a pipeline's stage: cut where FSDP2 gathers and reduces, and joined again to be proved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torchtitan.experiments.graph_trainer.graph_pp.graph_builder import GraphTrainerStageGraphs
from torchtitan.experiments.graph_trainer.graph_pp.split_fsdp_collectives import (
    GraphPPFSDPBackwardSplit,
    GraphPPFSDPForwardSplit,
)

from graphpasses._torch.fx_graphs import extracted, lazy_module
from graphpasses.analysis.parameter_collectives import CAST, UNSHARD_OPS, find_grad_reductions, gradient_summands
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import TrainGraph, argument, fake_value

aten = torch.ops.aten

UNREDUCED = "graphpasses_unreduced"
"""Key of a node's ``meta``: this rank's gradient, of which output and in which dtype FSDP reduces it."""


def mark_unreduced(graph: TrainGraph, num_results: int, plan: BucketPlan, compute: torch.dtype) -> dict[int, str]:
    """Marks the gradients of a stage's parameters as they are, in the dtype of compute, before FSDP casts them.

    In the joint graph they are reduced one by one; ``num_results`` of its outputs come before them. Returns the
    parameters' FQNs, by their gradients' places among the outputs that are gradients.
    """
    marked: dict[int, str] = {}
    reductions, values = find_grad_reductions(graph), graph.output_values
    dtypes = {
        fqn: bucket.reduction.dtype
        for bucket in plan.resolve(graph.model)
        for fqn in bucket.fqns
        if bucket.reduction is not None
    }
    for fqn, slots in graph.gradient_slots().items():
        if values[slots[0]] is None and len(slots) == 1:
            continue
        found = reductions.get(fqn, [])
        if len(slots) > 1 or len(found) > 1:
            raise UnsupportedError(
                f"the gradients of several uses of {fqn!r} are reduced apart in a pipeline's stage, and microbatches "
                "cannot be added before. Use the parameter once (no tied weights), or train without pipeline "
                "parallelism"
            )
        if found:
            chain = [found[0].gradient, found[0].entry]
        else:  # over one rank nothing is reduced, and FSDP2 casts all the same
            source, tail = next(gradient_summands(values[slots[0]]))
            chain = [source, *tail]
        # Of several casts the first is autograd's.
        gradient = next((node for node in chain if node.meta["val"].dtype == compute), chain[0])
        dtype = dtypes.get(fqn) or gradient.meta["val"].dtype
        gradient.meta.setdefault(UNREDUCED, []).append((slots[0] - num_results, dtype))
        marked[slots[0] - num_results] = fqn
    return marked


def cut_unshards(
    module: fx.GraphModule,
    *,
    num_params: int,
    fwd_input_names: tuple[str, ...],
    fwd_flat_input_indices: tuple[int, ...],
) -> GraphPPFSDPForwardSplit:
    """Does what graph_trainer's ``split_forward_fsdp_collectives`` does, also where several are gathered as one.

    What is left takes its inputs from what parameters are read as, then buffers and the stage's inputs. Of the former
    there may be more than parameters, as where backward gathers some again; else None fills the list.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    assert tuple(node.name for node in placeholders) == fwd_input_names
    indices = dict(zip(placeholders, fwd_flat_input_indices, strict=True))
    parameters = [node for node in placeholders if indices[node] < num_params]
    others = [node for node in placeholders if indices[node] >= num_params]
    made = dict.fromkeys(parameters)
    for node in graph.nodes:
        if node.target in UNSHARD_OPS and node.all_input_nodes and made.keys() >= set(node.all_input_nodes):
            made[node] = None
    outside = dict.fromkeys(node for node in made if any(user not in made for user in node.users))
    read = [node for node in outside if not _is_view_of(node, outside)]
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    rest = extracted(module, [*read, *others], outputs, "fw_no_fsdp")
    num_values = max(num_params, len(read))
    return GraphPPFSDPForwardSplit(
        unshard_module=extracted(module, parameters, [*read, *[None] * (num_values - len(read))], "unshard"),
        fw_no_fsdp_module=rest,
        unshard_flat_param_indices=tuple(indices[node] for node in parameters),
        unshard_output_names=_names(read),
        fw_no_fsdp_input_names=_names(rest.graph.find_nodes(op="placeholder")),
        fw_no_fsdp_flat_input_indices=(
            *range(len(read)),
            *(indices[node] - num_params + num_values for node in others),
        ),
        num_fw_unsharded_param_inputs=0,
        fw_no_fsdp_output_names=_names(rest.graph.output_node().args[0]),  # type: ignore[arg-type]
    )


def _is_view_of(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Whether a node is a view of one of others, from which it can be made again."""
    while node.target in (aten.view.default, aten.slice.Tensor):
        node = argument(node)
        if node in others:
            return True
    return False


def cut_reductions(
    module: fx.GraphModule, *, num_param_grads: int, marked: Mapping[int, str], apart: Collection[int] = ()
) -> GraphPPFSDPBackwardSplit:
    """Does what graph_trainer's ``split_backward_fsdp_collectives`` does, also where several are reduced as one.

    Gradients leave backward before FSDP casts them. The graph that reduces them takes their sums, cast; those that
    are reduced ``apart`` are not in it.
    """
    outputs = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    unreduced: list[Any] = outputs[:num_param_grads]
    dtypes: dict[str, torch.dtype] = {}
    found: dict[int, None] = {}
    for node in module.graph.nodes:
        for slot, dtype in node.meta.get(UNREDUCED, ()):
            unreduced[slot], dtypes[node.name], found[slot] = node, dtype, None
    if lost := [fqn for slot, fqn in marked.items() if slot not in found]:
        raise UnsupportedError(
            f"the gradient of {lost[0]!r} is reduced otherwise than cast from the dtype of compute, and microbatches "
            "cannot be added before. Reduce in another dtype (--training.mixed_precision_reduce), or train without "
            "pipeline parallelism"
        )
    inputs = [
        *dict.fromkeys(node for slot, node in enumerate(unreduced) if isinstance(node, fx.Node) and slot not in apart)
    ]
    reduced = [None if slot in apart else value for slot, value in enumerate(outputs[:num_param_grads])]
    placeholders = module.graph.find_nodes(op="placeholder")
    backward = extracted(module, placeholders, [*unreduced, *outputs[num_param_grads:]], "bw_no_fsdp")
    reduce = extracted(module, inputs, reduced, "reduce_grad")
    take_cast(reduce, dtypes)
    return GraphPPFSDPBackwardSplit(
        bw_no_fsdp_module=backward,
        reduce_grad_module=reduce,
        bw_no_fsdp_output_names=_names(backward.graph.output_node().args[0]),  # type: ignore[arg-type]
        reduce_grad_input_names=_names(reduce.graph.find_nodes(op="placeholder")),
    )


def take_cast(module: fx.GraphModule, dtypes: dict[str, torch.dtype]) -> None:
    """Lets a graph take tensors in other dtypes, by the placeholders' names, and drops casts to what they are."""
    for node in module.graph.nodes:
        if node.op == "placeholder" and node.name in dtypes:
            node.meta["val"] = node.meta["val"].to(dtypes[node.name])
        elif node.op == "call_function":
            node.meta["val"] = fake_value(node)
            (source, *_) = node.all_input_nodes
            if node.target == CAST and node.kwargs == {"dtype": source.meta["val"].dtype}:
                node.replace_all_uses_with(source)
    module.graph.eliminate_dead_code()
    module.recompile()


def joined_stage(
    graph: TrainGraph,
    graphs: GraphTrainerStageGraphs,
    *,
    is_split: bool,
    apart: tuple[Sequence[int], fx.GraphModule] | None = None,
) -> fx.GraphModule:
    """Joins a stage's graphs to one with the inputs and outputs of the joint graph, as a microbatch runs them.

    ``is_split`` says whether gradients of inputs and of weights come from graphs of their own, ``apart`` which
    gradients another graph reduces, and that graph.
    """
    modules, meta = graphs.modules, graphs.meta
    whole = fx.Graph()
    flat: list[Any] = []
    for placeholder in graph.placeholders:
        flat.append(whole.placeholder(placeholder.name))
        flat[-1].meta.update(placeholder.meta)

    def run(module: fx.GraphModule, arguments: Sequence[Any]) -> list[Any]:
        inputs = module.graph.find_nodes(op="placeholder")
        values = whole.graph_copy(module.graph, dict(zip(inputs, arguments, strict=True)))
        return list(values)  # type: ignore[arg-type]

    assert modules.unshard is not None
    assert modules.reduce_grad is not None
    unsharded = run(modules.unshard, [flat[index] for index in meta.unshard_flat_param_indices])
    given = [*unsharded, *flat[meta.num_flat_param_values :]]
    results = run(modules.fw, [given[index] for index in meta.fwd_flat_input_indices])
    num_results = meta.num_user_outputs
    saved = results[num_results : num_results + meta.num_saved_for_backward]
    tangents = flat[len(flat) - num_results :] if not meta.is_last_stage else []
    given = [*saved, *(tangents[index] for index in meta.partition.backward_grad_input_indices)]
    if is_split:
        assert modules.bw_di is not None
        assert modules.bw_dw is not None
        values = run(modules.bw_di, given)
        of_inputs = values[: meta.num_input_grad_values]
        of_weights = run(modules.bw_dw, values[meta.num_input_grad_values :])
    else:
        values = run(modules.full_bw, given)
        of_weights, of_inputs = values[: meta.num_param_grad_values], values[meta.num_param_grad_values :]
    names = meta.bw_no_fsdp_output_names[: meta.num_param_grad_values]
    by_name = dict(zip(names, of_weights, strict=True))

    def reduce(module: fx.GraphModule, by_name: Mapping[str, Any]) -> list[Any]:
        inputs = module.graph.find_nodes(op="placeholder")
        return run(module, [_cast(whole, by_name[node.name], node) for node in inputs])

    gradients = reduce(modules.reduce_grad, by_name)
    if apart is not None:
        slots, module = apart
        for slot, value in zip(slots, reduce(module, by_name), strict=True):
            gradients[slot] = value
    whole.output([*results[:num_results], *gradients, *of_inputs])
    return lazy_module(graph.module, whole)


def _cast(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    wanted = like.meta.get("val")
    if not isinstance(wanted, torch.Tensor) or value.meta["val"].dtype == wanted.dtype:
        return value
    cast = graph.call_function(CAST, (value,), {"dtype": wanted.dtype})
    cast.meta = {**value.meta, "val": fake_value(cast)}
    return cast


def _names(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(
        value.name if isinstance(value, fx.Node) else f"output_{index}" for index, value in enumerate(values)
    )
