"""NCCL's collectives, on rings and trees, on CPU, bit for bit: the order in which the ranks' contributions are added.

gloo adds in an order that does not depend on an element's place in the buffer, so it cannot show that a
bucket was laid out wrongly. NCCL's order does. Importing this package registers the ``nccl_sim`` backend.
"""

from graphpasses.simulate.choice import Choice as Choice
from graphpasses.simulate.choice import choose as choose
from graphpasses.simulate.choice import played as played
from graphpasses.simulate.cluster import run_cluster as run_cluster
from graphpasses.simulate.cluster import share as share
from graphpasses.simulate.cluster import step_for_rank as step_for_rank
from graphpasses.simulate.drift import Drift as Drift
from graphpasses.simulate.drift import find_drift as find_drift
from graphpasses.simulate.environment import with_environment as with_environment
from graphpasses.simulate.hardware import Hardware as Hardware
from graphpasses.simulate.logs import topology_from_log as topology_from_log
from graphpasses.simulate.prediction import Prediction as Prediction
from graphpasses.simulate.prediction import other_algorithms as other_algorithms
from graphpasses.simulate.prediction import predict as predict
from graphpasses.simulate.prediction import sweep as sweep
from graphpasses.simulate.process_group import NCCLSimProcessGroup as NCCLSimProcessGroup
from graphpasses.simulate.process_group import configure as configure
from graphpasses.simulate.rings import Topology as Topology
from graphpasses.simulate.rings import default_topology as default_topology
from graphpasses.simulate.topology_diff import TopologyDiff as TopologyDiff
from graphpasses.simulate.topology_diff import diff_topologies as diff_topologies
from graphpasses.simulate.tuning_log import TuningLog as TuningLog
