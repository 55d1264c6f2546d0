"""NCCL's collectives, on rings and trees, on CPU, bit for bit: the order in which the ranks' contributions are added.

gloo adds in an order that does not depend on an element's place in the buffer, so it cannot show that a
bucket was laid out wrongly. NCCL's order does. Importing this package registers the ``nccl_sim`` backend.
"""

from graphpasses.simulate.arithmetic import ReduceOpName as ReduceOpName
from graphpasses.simulate.arithmetic import fused_multiply_add as fused_multiply_add
from graphpasses.simulate.arithmetic import reduce_in_order as reduce_in_order
from graphpasses.simulate.choice import Choice as Choice
from graphpasses.simulate.choice import choose as choose
from graphpasses.simulate.choice import played as played
from graphpasses.simulate.cluster import run_cluster as run_cluster
from graphpasses.simulate.cluster import share as share
from graphpasses.simulate.cluster import step_for_rank as step_for_rank
from graphpasses.simulate.collectives import reduce_parts as reduce_parts
from graphpasses.simulate.collectives import simulate_all_reduce as simulate_all_reduce
from graphpasses.simulate.collectives import simulate_reduce_scatter as simulate_reduce_scatter
from graphpasses.simulate.drift import Drift as Drift
from graphpasses.simulate.drift import Replicas as Replicas
from graphpasses.simulate.drift import find_drift as find_drift
from graphpasses.simulate.environment import parse_selection as parse_selection
from graphpasses.simulate.environment import with_environment as with_environment
from graphpasses.simulate.hardware import Hardware as Hardware
from graphpasses.simulate.logs import parse_nccl_log as parse_nccl_log
from graphpasses.simulate.logs import parse_trees as parse_trees
from graphpasses.simulate.logs import topology_from_log as topology_from_log
from graphpasses.simulate.nccl import Collective as Collective
from graphpasses.simulate.nccl import ReductionPart as ReductionPart
from graphpasses.simulate.nccl import channel_parts as channel_parts
from graphpasses.simulate.nccl import num_channels as num_channels
from graphpasses.simulate.nccl import reduction_parts as reduction_parts
from graphpasses.simulate.prediction import OtherAlgorithm as OtherAlgorithm
from graphpasses.simulate.prediction import Prediction as Prediction
from graphpasses.simulate.prediction import Reordered as Reordered
from graphpasses.simulate.prediction import Setting as Setting
from graphpasses.simulate.prediction import other_algorithms as other_algorithms
from graphpasses.simulate.prediction import predict as predict
from graphpasses.simulate.prediction import sweep as sweep
from graphpasses.simulate.process_group import NCCLSimProcessGroup as NCCLSimProcessGroup
from graphpasses.simulate.process_group import configure as configure
from graphpasses.simulate.rings import Algorithm as Algorithm
from graphpasses.simulate.rings import Mode as Mode
from graphpasses.simulate.rings import Protocol as Protocol
from graphpasses.simulate.rings import Ring as Ring
from graphpasses.simulate.rings import Topology as Topology
from graphpasses.simulate.rings import Tree as Tree
from graphpasses.simulate.rings import default_topology as default_topology
from graphpasses.simulate.rings import rings as rings
from graphpasses.simulate.topology_diff import GradientBits as GradientBits
from graphpasses.simulate.topology_diff import TopologyDiff as TopologyDiff
from graphpasses.simulate.topology_diff import diff_topologies as diff_topologies
from graphpasses.simulate.trees import tree_order as tree_order
from graphpasses.simulate.trees import trees as trees
from graphpasses.simulate.tuning_log import TuningLog as TuningLog
from graphpasses.simulate.tuning_log import parse_tuning_log as parse_tuning_log
