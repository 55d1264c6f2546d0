"""Gradients whose bits depend neither on rings and NCCL nor on how many ranks, and in which shape, compute them.

The microbatches of a global batch are the leaves of one binary tree. Microbatch ``k`` is the ``j``-th of rank ``r``
with ``k = j * num_ranks + r``, so the lowest levels of the tree lie on ranks (:func:`canonical_reductions`), and what
is above them in time (``microbatches.py``). Of HSDP's levels those of shards come first, then those of replicas:
rank 5 of a 2 x 4 mesh is rank 5 of 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpasses._torch import fsdp2
from graphpasses._torch.fsdp2_parameters import named_sharded_parameters
from graphpasses.errors import UnsupportedError
from graphpasses.ops.reduce_in_tree import (
    ALL_REDUCE_IN_TREE,
    REDUCE_SCATTER_IN_TREE,
    accumulate_dtype,
    reduce_scatter_in_tree,
    tree_op,
)

CLIP_NOTE = (
    "clip_norm clips by torch's norm, whose bits depend on the number of ranks though those of gradients do not. "
    "Leave it out, and call canonical_clip_grad_norm_ before the optimizer"
)


def canonical_reductions(model: nn.Module, *, accumulate: torch.dtype | None = None) -> nn.Module:
    """Lets a model that ``fully_shard`` wrapped reduce its gradients to the same bits on any number of ranks.

    A reduction becomes an all-to-all, after which each rank adds what it received in a binary tree over ranks. Sums
    are not divided: divide the loss by the number of microbatches of the *global* batch. A rank that has several
    adds their gradients with :class:`~graphpasses.MicrobatchTree`. Microbatch ``k`` belongs to rank
    ``k % num_ranks``, as :class:`~graphpasses.MicrobatchSampler` deals them. Their number may be any multiple of the
    number of ranks, which must be a power of two.

    What else must not depend on the number of ranks is in ``docs/any_cluster.md``.

    Args:
        model: sharded by ``fully_shard``, over one axis or two (HSDP), on all of whose modules it acts.
        accumulate: dtype in which contributions are added, and gradients kept unrounded; they travel in FSDP2's
            ``reduce_dtype``. With ``torch.float32`` and a ``reduce_dtype`` of bfloat16, as many bytes travel as with
            bfloat16 alone, and sums are nearly exact. None adds in ``reduce_dtype``, and rounds at each level.

    Returns:
        The same model.

    Raises:
        UnsupportedError: the number of ranks is no power of two, ranks of the mesh are not in ascending order, HSDP's
            groups of shards have one rank, FSDP2 does not reduce a trainable parameter, or gradients are kept in a
            dtype that rounds what was added.

    Example:
        >>> from torch.distributed.fsdp import fully_shard
        >>> with fake_process_group(2):
        ...     model = fully_shard(nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (2,)))
        ...     (bucket,) = graphpasses.eager_layout(graphpasses.canonical_reductions(model)).buckets
        >>> bucket.op
        'tree'
    """
    groups = fsdp2.fsdp_groups(model)
    if not groups:
        raise UnsupportedError("the model has no FSDP2 parameter group; call fully_shard on it first")
    managed = {id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params}
    for fqn, parameter in named_sharded_parameters(model):
        if parameter.requires_grad and id(parameter) not in managed:
            raise UnsupportedError(
                f"parameter {fqn!r} is trained, and FSDP2 does not reduce its gradient. Let fully_shard manage it"
            )
    for module, _ in fsdp2.fsdp_states(model):
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    read = fsdp2.read_groups(model)
    for group, each in read.items():
        _check(each, fsdp2.mesh_ranks(group), accumulate)
    refuse_order_of_experts({f"FSDP2 group {each.name!r}": fsdp2.mesh_ranks(group) for group, each in read.items()})
    for group in groups:
        fsdp2.reduce_by(group, TreeReduceScatter(group, accumulate))
    return model


def _check(group: fsdp2.ParameterGroup, ranks: Sequence[int], accumulate: torch.dtype | None) -> None:
    subject, replicas = f"FSDP2 group {group.name!r}", group.replicate_ranks or ()
    if len(group.shard_ranks) == 1 and len(replicas) > 1:
        raise UnsupportedError(
            f"{subject} has replicas of one shard, which FSDP2 reduces by an all-reduce that cannot be replaced. "
            "Shard over the ranks instead (with expert parallelism, over more than its degree)"
        )
    refuse_ranks(subject, group.shard_ranks, replicas, ranks)
    added = refuse_rounding(subject, group.reduce_dtype, accumulate)
    for dtype in group.kept_dtypes:
        if torch.promote_types(dtype, added) != dtype:
            raise UnsupportedError(
                f"{subject} keeps gradients in {dtype}, which would round the sums of each microbatch, added in "
                f"{added}. Let the parameters be {added}, or reduce in {dtype}"
            )


def refuse_ranks(subject: str, shards: Sequence[int], replicas: Sequence[int], mesh: Sequence[int]) -> None:
    """Raises where ranks make no tree that is one for any number of them; ``mesh`` has all of them, row by row."""
    for size in (len(shards), len(replicas)):
        if size & (size - 1):
            lower = 1 << math.floor(math.log2(size))
            raise UnsupportedError(
                f"{subject} is reduced over {size} ranks, and a binary tree needs a power of two: "
                f"take {lower} or {2 * lower}"
            )
    if list(mesh) != sorted(mesh):
        raise UnsupportedError(
            f"{subject} is reduced over the ranks {list(mesh)}, in this order, and the tree is one over ranks in "
            "ascending order. Make the mesh with init_device_mesh"
        )


def ranks_of_mesh(shards: Sequence[int], replicas: Sequence[int]) -> list[int]:
    """Returns the ranks of a whole mesh, row by row, which a rank's own row and column tell."""
    own = next((rank for rank in shards if rank in replicas), 0)
    return [rank + replica - own for replica in replicas or (0,) for rank in shards]


def refuse_order_of_experts(meshes: Mapping[str, Sequence[int]]) -> None:
    """Raises where experts that several ranks share do not get the same microbatches on any number of ranks.

    Ranks that share experts compute their microbatches together, so these are leaves of the experts' tree: on 4 ranks
    as on 2 those of ranks 0 and 1, if each n-th rank has the same experts.
    """
    wholes = {tuple(mesh) for mesh in meshes.values()}
    for subject, own in meshes.items():
        for whole in wholes:
            if set(own) < set(whole) and list(own) != list(whole[whole.index(own[0]) :: len(whole) // len(own)]):
                raise UnsupportedError(
                    f"{subject} is reduced over the ranks {list(own)} of {list(whole)}, so ranks that are no "
                    "neighbours share experts, and which microbatches they compute together depends on the number "
                    "of ranks. Let the expert-parallel axis be the last of the mesh"
                )


def refuse_rounding(subject: str, sent: torch.dtype, accumulate: torch.dtype | None) -> torch.dtype:
    """Returns in which dtype contributions are added; raises where it would round them."""
    added = accumulate or sent
    if torch.promote_types(added, sent) != added:
        raise UnsupportedError(f"{subject} sends {sent}, which {added} would round")
    return added


class TreeReduceScatter(fsdp2.ReduceScatterInGraph):
    """FSDP2's reduce-scatter as a tree; with HSDP it reduces over the replicas, too.

    Then each rank has the sum of one part of its shard, and negative zeros elsewhere, to which FSDP2's all-reduce
    adds nothing: ``-0.0 + x`` is ``x``, bit for bit, in any order.
    """

    all_reduce_op = tree_op()

    def __init__(self, group: Any, accumulate: torch.dtype | None) -> None:
        self.reduce_scatter_op = tree_op(accumulate)
        self.all_reduce_dtype = accumulate
        self._group = group
        self._input_numel = 0

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer; FSDP2 asks for that of a reduction's input, then for its output's."""
        numel, num_ranks = math.prod(size), fsdp2.num_shards(self._group)
        if self._input_numel == numel * num_ranks:
            dtype, numel = accumulate_dtype(self.reduce_scatter_op, dtype), 0
        self._input_numel = numel
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *_: Any, **__: Any
    ) -> None:
        fsdp2.reduces_partly(self._group)  # which raises
        reduced = reduce_scatter_in_tree(input_tensor, self.reduce_scatter_op, group.size(), group.group_name)
        if output_tensor.dtype != reduced.dtype:  # which copying would round
            raise UnsupportedError(
                "FSDP2 asked for the buffers of a reduction in another order than that of torch 2.13: its output is "
                f"{output_tensor.dtype}, and the sum {reduced.dtype}"
            )
        replicas = fsdp2.replicate_group(self._group)
        if replicas is None or replicas.size() == 1:
            output_tensor.copy_(reduced)
            return
        num_replicas, numel = replicas.size(), reduced.numel()
        padded = torch.nn.functional.pad(reduced, [0, -numel % num_replicas])
        part = reduce_scatter_in_tree(padded, self.all_reduce_op, num_replicas, replicas.group_name)
        start = replicas.rank() * part.numel()
        output_tensor.fill_(-0.0)[start : start + part.numel()].copy_(part[: max(numel - start, 0)])

    def reduce_scatter(self, packed: Tensor, group: dist.ProcessGroup) -> Tensor:
        reduced: Tensor = REDUCE_SCATTER_IN_TREE(packed, self.reduce_scatter_op, group.size(), group.group_name)
        return reduced

    def all_reduce(self, packed: Tensor, group: dist.ProcessGroup) -> Tensor:
        reduced: Tensor = ALL_REDUCE_IN_TREE(packed, self.all_reduce_op, group.group_name)
        return reduced
