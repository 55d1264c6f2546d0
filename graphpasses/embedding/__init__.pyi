from graphpasses.embedding.model_parallel import DistributedModelParallel as DistributedModelParallel
from graphpasses.embedding.planner import plan as plan
