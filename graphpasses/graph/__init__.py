"""What a captured training step is: a graph, what its inputs and outputs are, and what is legal in it."""

from graphpasses.graph.parameters import ParameterInfo, find_state, parameter_infos
from graphpasses.graph.train_graph import (
    ALL_TO_ALL,
    WAIT,
    GraphInput,
    GraphOutput,
    InputKind,
    OutputKind,
    Stage,
    TrainGraph,
    argument,
    fake_value,
    find_collectives,
    is_collective,
)

__all__ = [
    "ALL_TO_ALL",
    "WAIT",
    "GraphInput",
    "GraphOutput",
    "InputKind",
    "OutputKind",
    "ParameterInfo",
    "Stage",
    "TrainGraph",
    "argument",
    "fake_value",
    "find_collectives",
    "find_state",
    "is_collective",
    "parameter_infos",
]
