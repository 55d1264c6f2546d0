"""The passes, one per file, and the pipeline that makes a captured FSDP step equal to eager FSDP2's."""

from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.passes.bucket_all_to_all import BucketAllToAll
from graphpasses.passes.bucket_fsdp_collectives import BucketFSDPCollectives
from graphpasses.passes.coalesce_grad_reductions import CoalesceGradReductions
from graphpasses.passes.deduplicate_shared import DeduplicateShared
from graphpasses.passes.fold_sizes import FoldSizes
from graphpasses.passes.fuse_tbe import FuseTBE
from graphpasses.passes.hoist_input_dists import HoistInputDists
from graphpasses.passes.lower_embedding_bags import LowerEmbeddingBags
from graphpasses.passes.prefetch_collectives import PrefetchCollectives
from graphpasses.passes.regather_parameters import RegatherParameters
from graphpasses.passes.reinplace_tbe_updates import ReinplaceTBEUpdates
from graphpasses.pipeline import Pipeline

__all__ = [
    "BucketAllToAll",
    "BucketFSDPCollectives",
    "CoalesceGradReductions",
    "DeduplicateShared",
    "FoldSizes",
    "FuseTBE",
    "HoistInputDists",
    "LowerEmbeddingBags",
    "PrefetchCollectives",
    "RegatherParameters",
    "ReinplaceTBEUpdates",
    "default_pipeline",
    "recommender_pipeline",
]


def default_pipeline(
    plan: BucketPlan, *, contract: Layout | None = None, disable: tuple[str, ...] = ()
) -> Pipeline:
    """Returns the pipeline whose result has eager FSDP2's bits and number of collectives.

    Args:
        plan: the buckets, e.g. ``BucketPlan.from_fully_shard(eager_model)``.
        contract: layout that the result must equal, e.g. ``eager_layout(eager_model)``; None checks nothing.
        disable: names of passes to leave out.

    Example:
        >>> step = default_pipeline(plan).run(capture_train_step(loss_fn, model, batch))  # doctest: +SKIP
    """
    return Pipeline(
        (
            DeduplicateShared(),
            CoalesceGradReductions(),
            BucketFSDPCollectives(plan, contract),
            RegatherParameters(plan),
            PrefetchCollectives(),
        ),
        disable=disable,
    )


def recommender_pipeline(*, lower_embedding_bags: bool = False, disable: tuple[str, ...] = ()) -> Pipeline:
    """Returns the pipeline for models with embedding tables: what ``torch.compile(backend="graphpasses")`` runs.

    Args:
        lower_embedding_bags: make lookups of FBGEMM's TBE of a plain model's ``embedding_bag`` calls, too, which is
            many times as fast but may round otherwise than eager.
        disable: names of passes to leave out.

    Example:
        >>> [p.name for p in recommender_pipeline().passes][0]
        'deduplicate-shared'
    """
    lowering = (LowerEmbeddingBags(),) if lower_embedding_bags else ()
    return Pipeline(
        (
            *lowering,
            DeduplicateShared(),
            HoistInputDists(),
            FuseTBE(),
            FoldSizes(),
            BucketAllToAll(),
            ReinplaceTBEUpdates(),
        ),
        disable=disable,
    )
