from graphpasses.capture.compile_report import CompileReport as CompileReport
from graphpasses.capture.simple_fsdp import simple_fsdp as simple_fsdp
from graphpasses.capture.torch_compile import compile as compile
from graphpasses.capture.traced_result import read_traced_result as read_traced_result
from graphpasses.capture.train_step import capture_train_step as capture_train_step
from graphpasses.errors import GraphPassesError as GraphPassesError
from graphpasses.fsdp.graph_layout import graph_layout as graph_layout
from graphpasses.fsdp.layout import Layout as Layout
from graphpasses.fsdp.layout import eager_layout as eager_layout
from graphpasses.fsdp.layout_diff import diff_layouts as diff_layouts
from graphpasses.fsdp.plan import BucketPlan as BucketPlan
from graphpasses.fsdp.plan import Reduction as Reduction
from graphpasses.graph import CapturedStep as CapturedStep
from graphpasses.graph import TrainGraph as TrainGraph
from graphpasses.graph.pass_report import Numerics as Numerics
from graphpasses.identity import IdentityMap as IdentityMap
from graphpasses.identity import preserve_identity as preserve_identity
from graphpasses.parity.compare import compare_runs as compare_runs
from graphpasses.parity.hashing import weight_hash as weight_hash
from graphpasses.parity.record import ParityRecorder as ParityRecorder
from graphpasses.parity.run_file import read_run as read_run
from graphpasses.passes import default_pipeline as default_pipeline
from graphpasses.passes import recommender_pipeline as recommender_pipeline
from graphpasses.passes.runner import GraphPass as GraphPass
from graphpasses.passes.runner import Pipeline as Pipeline

__version__: str
