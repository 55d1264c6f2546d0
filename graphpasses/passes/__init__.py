"""The passes, one per file, and the pipeline that makes a captured FSDP step equal to eager FSDP2's."""

from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.passes.bucket_all_to_all import BucketAllToAll
from graphpasses.passes.bucket_fsdp_collectives import BucketFSDPCollectives
from graphpasses.passes.coalesce_grad_reductions import CoalesceGradReductions
from graphpasses.passes.deduplicate_shared import DeduplicateShared
from graphpasses.passes.prefetch_collectives import PrefetchCollectives
from graphpasses.passes.regather_parameters import RegatherParameters
from graphpasses.passes.reinplace_tbe_updates import ReinplaceTBEUpdates
from graphpasses.pipeline import Pipeline

__all__ = [
    "BucketAllToAll",
    "BucketFSDPCollectives",
    "CoalesceGradReductions",
    "DeduplicateShared",
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


def recommender_pipeline(*, disable: tuple[str, ...] = ()) -> Pipeline:
    """Returns the pipeline for models with embedding tables: what ``torch.compile(backend="graphpasses")`` runs.

    Args:
        disable: names of passes to leave out.

    Example:
        >>> [p.name for p in recommender_pipeline().passes][0]
        'deduplicate-shared'
    """
    return Pipeline((DeduplicateShared(), BucketAllToAll(), ReinplaceTBEUpdates()), disable=disable)
