"""What a captured training step is: a graph, what its inputs and outputs are, and what is legal in it."""

from graphpasses.graph.captured_step import CapturedStep as CapturedStep
from graphpasses.graph.dynamo_graph import DynamoGraph as DynamoGraph
from graphpasses.graph.nodes import ALL_TO_ALL as ALL_TO_ALL
from graphpasses.graph.nodes import WAIT as WAIT
from graphpasses.graph.nodes import argument as argument
from graphpasses.graph.nodes import fake_value as fake_value
from graphpasses.graph.nodes import find_collectives as find_collectives
from graphpasses.graph.nodes import is_collective as is_collective
from graphpasses.graph.nodes import wait_of as wait_of
from graphpasses.graph.parameters import ParameterInfo as ParameterInfo
from graphpasses.graph.parameters import get_state as get_state
from graphpasses.graph.parameters import parameter_infos as parameter_infos
from graphpasses.graph.train_graph import GraphInput as GraphInput
from graphpasses.graph.train_graph import GraphOutput as GraphOutput
from graphpasses.graph.train_graph import InputKind as InputKind
from graphpasses.graph.train_graph import OutputKind as OutputKind
from graphpasses.graph.train_graph import Stage as Stage
from graphpasses.graph.train_graph import TrainGraph as TrainGraph
