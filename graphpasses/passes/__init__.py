"""The passes, one per file, and the pipelines made of them."""

from graphpasses.passes.embedding.bucket_all_to_all import BucketAllToAll
from graphpasses.passes.embedding.bucket_pooled_all_to_all import BucketPooledAllToAll
from graphpasses.passes.embedding.deduplicate_lookups import DeduplicateLookups
from graphpasses.passes.embedding.deduplicate_sizes import DeduplicateSizes
from graphpasses.passes.embedding.eliminate_split_cat import EliminateSplitCat
from graphpasses.passes.embedding.fuse_size_tensors import FuseSizeTensors
from graphpasses.passes.embedding.fuse_tbe import FuseTBE
from graphpasses.passes.embedding.hoist_input_dists import HoistInputDists
from graphpasses.passes.embedding.lower_embedding_bags import LowerEmbeddingBags
from graphpasses.passes.embedding.reinplace_tbe_updates import ReinplaceTBEUpdates
from graphpasses.passes.fsdp.bucket_fsdp_collectives import BucketFSDPCollectives
from graphpasses.passes.fsdp.coalesce_grad_reductions import CoalesceGradReductions
from graphpasses.passes.fsdp.deduplicate_shared import DeduplicateShared
from graphpasses.passes.fsdp.prefetch_collectives import PrefetchCollectives
from graphpasses.passes.fsdp.reshard_after_forward import ReshardAfterForward
from graphpasses.passes.pipelines import default_pipeline, recommender_pipeline

__all__ = [
    "BucketAllToAll",
    "BucketFSDPCollectives",
    "BucketPooledAllToAll",
    "CoalesceGradReductions",
    "DeduplicateLookups",
    "DeduplicateShared",
    "DeduplicateSizes",
    "EliminateSplitCat",
    "FuseSizeTensors",
    "FuseTBE",
    "HoistInputDists",
    "LowerEmbeddingBags",
    "PrefetchCollectives",
    "ReinplaceTBEUpdates",
    "ReshardAfterForward",
    "default_pipeline",
    "recommender_pipeline",
]
