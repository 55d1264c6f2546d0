"""What a captured training step is: a graph, what its inputs and outputs are, and what is legal in it."""

from graphpasses.graph.captured_step import CapturedStep
from graphpasses.graph.dynamo_graph import DynamoGraph
from graphpasses.graph.nodes import (
    ALL_TO_ALL,
    WAIT,
    argument,
    fake_value,
    find_collectives,
    is_collective,
    wait_of,
)
from graphpasses.graph.parameters import ParameterInfo, get_state, parameter_infos
from graphpasses.graph.train_graph import (
    GraphInput,
    GraphOutput,
    InputKind,
    OutputKind,
    Stage,
    TrainGraph,
)

__all__ = [
    "ALL_TO_ALL",
    "WAIT",
    "CapturedStep",
    "DynamoGraph",
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
    "get_state",
    "is_collective",
    "parameter_infos",
    "wait_of",
]
