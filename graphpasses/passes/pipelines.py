"""The pipelines that make compiled steps equal to eager FSDP2's and TorchRec's: literal tuples of passes."""

from __future__ import annotations

import torch

from graphpasses import passes
from graphpasses.errors import LayoutError, PipelineError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.passes.runner import GraphPass, Pipeline
from graphpasses.scale import Wire


def default_pipeline(
    plan: BucketPlan | None = None,
    *,
    expected_layout: Layout | None = None,
    canonical: bool | torch.dtype = False,
    fuse_table_updates: bool = False,
    fuse: bool = False,
    wire: Wire | None = None,
    budget: int | None = None,
    disable: tuple[str, ...] = (),
) -> Pipeline:
    """Returns the pipeline whose result has eager FSDP2's bits and number of collectives.

    Args:
        plan: the buckets, e.g. ``BucketPlan.from_fully_shard(eager_model)``; None for a step of a model on which
            ``fully_shard`` was called: its own.
        expected_layout: layout that the result must equal, e.g. ``eager_layout(eager_model)``. If it is None, it is
            the model's own without a plan, and not checked with one.
        canonical: add gradients in one tree over ranks, so that their bits depend neither on NCCL nor on the number
            of ranks; a dtype is the one in which they are added, see
            :class:`~graphpasses.passes.CanonicalReductions`. The bits are other ones than those of NCCL's order then.
        fuse_table_updates: update only the rows of embedding tables that were looked up, in steps that were
            captured with their optimizer: faster, but rounded otherwise than eager.
        fuse: compile groups of operators whose bits are fixed as one kernel each, when the step is first called;
            the bits stay.
        wire: how long collectives take: they are then launched and waited for where that costs least, by
            :class:`~graphpasses.passes.ScheduleCollectives`, and not in FSDP2's fixed order.
        budget: bytes of gathered parameters and gradients that this may take; None: as many as FSDP2's order.
        disable: names of passes to leave out.

    Raises:
        PipelineError: there is a budget without a wire.

    Example:
        >>> step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), nn.Linear(2, 1), torch.ones(3, 2))
        >>> step = default_pipeline(BucketPlan.from_modules([])).run(step)
        >>> [p.name for p in step.report.passes][:2]
        ['deduplicate-shared', 'coalesce-grad-reductions']
    """
    if budget is not None and wire is None:
        raise PipelineError(
            "a budget is for collectives that are scheduled; write default_pipeline(wire=Wire(), budget=…)"
        )
    moved = None if wire is None else passes.ScheduleCollectives(wire, budget)
    *first, last = _fsdp_passes(plan, expected_layout, canonical, moved)
    fused = (passes.FuseTableUpdates(),) if fuse_table_updates else ()
    kernels = (passes.FuseExactly(),) if fuse else ()
    return Pipeline((passes.DeduplicateShared(), *first, *fused, last, *kernels), disable=disable)


def recommender_pipeline(
    plan: BucketPlan | None = None,
    *,
    expected_layout: Layout | None = None,
    canonical: bool | torch.dtype = False,
    lower_embedding_bags: bool = False,
    disable: tuple[str, ...] = (),
) -> Pipeline:
    """Returns the pipeline for models with embedding tables: what ``torch.compile(backend="graphpasses")`` runs.

    Args:
        plan: the buckets of dense layers that SimpleFSDP shards, as in :func:`default_pipeline`; None if none are.
        expected_layout: layout that their reductions must have; None checks nothing.
        canonical: as in :func:`default_pipeline`, with a plan.
        lower_embedding_bags: replace a plain model's ``embedding_bag`` calls by lookups of FBGEMM's TBE, too, which
            is many times as fast but may round otherwise than eager.
        disable: names of passes to leave out.

    Raises:
        LayoutError: there is an expected layout, or canonical reductions are asked for, without a plan.

    Example:
        >>> [p.name for p in recommender_pipeline().passes][0]
        'deduplicate-shared'
        >>> compiled = graphpasses.compile(nn.Linear(2, 1), pipeline=recommender_pipeline(), inner="aot_eager")
        >>> compiled(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    if plan is None and expected_layout is not None:
        raise LayoutError(
            "an expected layout is met by a plan; write recommender_pipeline(plan, expected_layout=expected_layout)"
        )
    if plan is None and canonical:
        raise LayoutError(
            "canonical reductions are those of a plan's buckets; write recommender_pipeline(plan, canonical=True)"
        )
    return Pipeline(
        (
            *((passes.LowerEmbeddingBags(),) if lower_embedding_bags else ()),
            passes.DeduplicateShared(),
            passes.DeduplicateLookups(),
            passes.HoistInputDists(),
            passes.FuseTBE(),
            *(_fsdp_passes(plan, expected_layout, canonical) if plan is not None else ()),
            passes.DeduplicateSizes(),
            passes.BucketPooledAllToAll(),
            passes.BucketAllToAll(),
            passes.FuseSizeTensors(),
            passes.EliminateSplitCat(),
            passes.ReinplaceTBEUpdates(),
            passes.OverlapAllToAll(),
        ),
        disable=disable,
    )


def _fsdp_passes(
    plan: BucketPlan | None,
    expected_layout: Layout | None,
    canonical: bool | torch.dtype,
    moved: GraphPass | None = None,
) -> tuple[GraphPass, ...]:
    accumulate = None if isinstance(canonical, bool) else canonical
    return (
        passes.CoalesceGradReductions(plan),
        passes.BucketFSDPCollectives(plan, expected_layout),
        *((passes.CanonicalReductions(accumulate),) if canonical else ()),
        passes.ReshardAfterForward(plan),
        moved or passes.PrefetchCollectives(),
        passes.UpdateInBackward(),
    )
