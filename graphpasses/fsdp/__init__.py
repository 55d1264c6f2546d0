"""What eager FSDP2 does with its collectives: which parameters share one, and at which byte each one lies."""

from graphpasses.fsdp.layout import (
    BucketLayout,
    Layout,
    LayoutEntry,
    eager_layout,
    make_bucket_layout,
)
from graphpasses.fsdp.layout_diff import LayoutDiff, Move, Place, diff_layouts
from graphpasses.fsdp.plan import Bucket, BucketPlan, Reduction

__all__ = [
    "Bucket",
    "BucketLayout",
    "BucketPlan",
    "Layout",
    "LayoutDiff",
    "LayoutEntry",
    "Move",
    "Place",
    "Reduction",
    "diff_layouts",
    "eager_layout",
    "make_bucket_layout",
]
