"""The passes, one per file, and the pipelines that make compiled steps equal to eager FSDP2's and TorchRec's."""

from graphpasses.errors import LayoutError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.passes.bucket_all_to_all import BucketAllToAll
from graphpasses.passes.bucket_fsdp_collectives import BucketFSDPCollectives
from graphpasses.passes.coalesce_grad_reductions import CoalesceGradReductions
from graphpasses.passes.deduplicate_shared import DeduplicateShared
from graphpasses.passes.deduplicate_sizes import DeduplicateSizes
from graphpasses.passes.fold_columns import FoldColumns
from graphpasses.passes.fold_sizes import FoldSizes
from graphpasses.passes.fuse_tbe import FuseTBE
from graphpasses.passes.hoist_input_dists import HoistInputDists
from graphpasses.passes.lower_embedding_bags import LowerEmbeddingBags
from graphpasses.passes.prefetch_collectives import PrefetchCollectives
from graphpasses.passes.regather_parameters import RegatherParameters
from graphpasses.passes.reinplace_tbe_updates import ReinplaceTBEUpdates
from graphpasses.pipeline import GraphPass, Pipeline

__all__ = [
    "BucketAllToAll",
    "BucketFSDPCollectives",
    "CoalesceGradReductions",
    "DeduplicateShared",
    "DeduplicateSizes",
    "FoldColumns",
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
    return Pipeline((DeduplicateShared(), *_fsdp_passes(plan, contract)), disable=disable)


def recommender_pipeline(
    plan: BucketPlan | None = None,
    *,
    contract: Layout | None = None,
    lower_embedding_bags: bool = False,
    disable: tuple[str, ...] = (),
) -> Pipeline:
    """Returns the pipeline for models with embedding tables: what ``torch.compile(backend="graphpasses")`` runs.

    Args:
        plan: the buckets of dense layers that SimpleFSDP shards, as in :func:`default_pipeline`; None if none are.
        contract: layout that their reductions must have; None checks nothing.
        lower_embedding_bags: make lookups of FBGEMM's TBE of a plain model's ``embedding_bag`` calls, too, which is
            many times as fast but may round otherwise than eager.
        disable: names of passes to leave out.

    Raises:
        LayoutError: there is a contract without a plan.

    Example:
        >>> [p.name for p in recommender_pipeline().passes][0]
        'deduplicate-shared'
        >>> compiled = graphpasses.compile(model, pipeline=recommender_pipeline(plan))  # doctest: +SKIP
    """
    if plan is None and contract is not None:
        raise LayoutError("a contract is met by a plan; write recommender_pipeline(plan, contract=contract)")
    return Pipeline(
        (
            *((LowerEmbeddingBags(),) if lower_embedding_bags else ()),
            DeduplicateShared(),
            HoistInputDists(),
            FuseTBE(),
            *(_fsdp_passes(plan, contract) if plan is not None else ()),
            DeduplicateSizes(),
            BucketAllToAll(),
            FoldSizes(),
            FoldColumns(),
            ReinplaceTBEUpdates(),
        ),
        disable=disable,
    )


def _fsdp_passes(plan: BucketPlan, contract: Layout | None) -> tuple[GraphPass, ...]:
    return (
        CoalesceGradReductions(plan),
        BucketFSDPCollectives(plan, contract),
        RegatherParameters(plan),
        PrefetchCollectives(),
    )
