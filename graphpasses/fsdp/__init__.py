"""What eager FSDP2 does with its collectives: which parameters share one, and at which byte each one lies."""

from graphpasses.fsdp.layout import BucketLayout as BucketLayout
from graphpasses.fsdp.layout import Layout as Layout
from graphpasses.fsdp.layout import eager_layout as eager_layout
from graphpasses.fsdp.layout import make_bucket_layout as make_bucket_layout
from graphpasses.fsdp.layout_diff import diff_layouts as diff_layouts
from graphpasses.fsdp.plan import Bucket as Bucket
from graphpasses.fsdp.plan import BucketPlan as BucketPlan
from graphpasses.fsdp.plan import Reduction as Reduction
