"""What the update of a captured step reads, as inputs of the step's own graph."""

from __future__ import annotations

import re

import torch
from torch import fx

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses.graph.train_graph import GraphInput, TrainGraph


def add_update_input(graph: TrainGraph, item: GraphInput, node: fx.Node) -> fx.Node:
    """Adds an input of an update to its step, unless the step has it; returns its placeholder there."""
    placeholders = graph.placeholders
    if item in graph.inputs:
        return placeholders[graph.inputs.index(item)]
    mode = fake_mode_of([each.meta.get("val") for each in placeholders])
    assert mode is not None
    assert mode.shape_env is not None
    with graph.graph.inserting_before(placeholders[-1].next):
        made = graph.graph.placeholder(re.sub(r"\W", "_", f"{item.state}_of_{item.fqn}"))
    graph.inputs += (item,)
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        with mode:
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    elif isinstance(value, torch.SymFloat):
        with mode.shape_env.ignore_fresh_unbacked_symbols():  # an input: no call brings it
            value = mode.shape_env.create_unbacked_symfloat()
    made.meta["val"] = value
    return made
