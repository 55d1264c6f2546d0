"""Gradients whose bits depend neither on rings and NCCL nor on how many ranks, and in which shape, compute them.

The microbatches of a global batch are the leaves of one binary tree. Microbatch ``k`` is the ``j``-th of rank ``r``
with ``k = j * num_ranks + r``, so the lowest levels of the tree lie on ranks (:func:`canonical_reductions`), and what
is above them in time (:class:`MicrobatchTree`). Of HSDP's levels those of shards come first, then those of replicas:
rank 5 of a 2 x 4 mesh is rank 5 of 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.fsdp2 import (
    ParameterGroup,
    fsdp_groups,
    fsdp_states,
    group_of,
    named_sharded_parameters,
    read_groups,
)
from graphpasses._torch.fsdp2_reductions import (
    ReduceScatterInGraph,
    mesh_ranks,
    own_reduction,
    refuse_partial_reduction,
    replicate_group,
    shard_group,
)
from graphpasses.errors import UnsupportedError
from graphpasses.ops.reduce_in_tree import (
    ALL_REDUCE_IN_TREE,
    REDUCE_SCATTER_IN_TREE,
    accumulate_dtype,
    reduce_scatter_in_tree,
    tree_op,
)


def canonical_reductions(model: nn.Module, *, accumulate: torch.dtype | None = None) -> nn.Module:
    """Lets a model that ``fully_shard`` wrapped reduce its gradients to the same bits on any number of ranks.

    A reduction becomes an all-to-all, after which each rank adds what it received in a binary tree over ranks. Sums
    are not divided: divide the loss by the number of microbatches of the *global* batch. A rank that has several
    adds their gradients with :class:`MicrobatchTree`. Number the microbatches so that rank ``r`` of ``num_ranks`` has
    those with ``k % num_ranks == r``, in order; torch's ``DistributedSampler(shuffle=False)`` deals samples so. Their
    number may be any multiple of the number of ranks, which must be a power of two.

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
    groups = fsdp_groups(model)
    if not groups:
        raise UnsupportedError("the model has no FSDP2 parameter group; call fully_shard on it first")
    managed = {id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params}
    for fqn, parameter in named_sharded_parameters(model):
        if parameter.requires_grad and id(parameter) not in managed:
            raise UnsupportedError(
                f"parameter {fqn!r} is trained, and FSDP2 does not reduce its gradient. Let fully_shard manage it"
            )
    for module, _ in fsdp_states(model):
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    for group, read in read_groups(model).items():
        _check(read, mesh_ranks(group), accumulate)
    for module, _ in fsdp_states(model):
        if (own := group_of(module)) is not None:
            module.set_custom_reduce_scatter(TreeReduceScatter(own, accumulate))  # type: ignore[operator]
    return model


def _check(group: ParameterGroup, ranks: Sequence[int], accumulate: torch.dtype | None) -> None:
    sizes = [len(group.shard_ranks)]
    if group.replicate_ranks is not None:
        sizes.append(len(group.replicate_ranks))
        if sizes[0] == 1 and sizes[1] > 1:
            raise UnsupportedError(
                f"FSDP2 group {group.name!r} has replicas of one shard, which FSDP2 reduces by an all-reduce that "
                "cannot be replaced. Shard over the ranks instead"
            )
    for size in sizes:
        if size & (size - 1):
            lower = 1 << math.floor(math.log2(size))
            raise UnsupportedError(
                f"FSDP2 group {group.name!r} is reduced over {size} ranks, and a binary tree needs a power of two: "
                f"take {lower} or {2 * lower}"
            )
    if list(ranks) != sorted(ranks):
        raise UnsupportedError(
            f"the mesh of FSDP2 group {group.name!r} has its ranks in the order {list(ranks)}, and the tree is one "
            "over ranks in ascending order. Make the mesh with init_device_mesh"
        )
    added = accumulate or group.reduce_dtype
    if torch.promote_types(added, group.reduce_dtype) != added:
        raise UnsupportedError(
            f"FSDP2 group {group.name!r} sends {group.reduce_dtype}, which {added} would round"
        )
    for dtype in group.kept_dtypes:
        if torch.promote_types(dtype, added) != dtype:
            raise UnsupportedError(
                f"FSDP2 group {group.name!r} keeps gradients in {dtype}, which would round the sums of each "
                f"microbatch, added in {added}. Let the parameters be {added}, or reduce in {dtype}"
            )


class TreeReduceScatter(ReduceScatterInGraph):
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
        numel, num_ranks = math.prod(size), shard_group(self._group).size()
        if self._input_numel == numel * num_ranks:
            dtype, numel = accumulate_dtype(self.reduce_scatter_op, dtype), 0
        self._input_numel = numel
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *_: Any, **__: Any
    ) -> None:
        """Reduces eagerly."""
        refuse_partial_reduction(self._group)
        reduced = reduce_scatter_in_tree(input_tensor, self.reduce_scatter_op, group.size(), group.group_name)
        replicas = replicate_group(self._group)
        if replicas is None or replicas.size() == 1:
            output_tensor.copy_(reduced)
            return
        num_replicas, numel = replicas.size(), reduced.numel()
        padded = torch.nn.functional.pad(reduced, [0, -numel % num_replicas])
        part = reduce_scatter_in_tree(padded, self.all_reduce_op, num_replicas, replicas.group_name)
        start = replicas.rank() * part.numel()
        output_tensor.fill_(-0.0)[start : start + part.numel()].copy_(part[: max(numel - start, 0)])

    def reduce_scatter(self, packed: Tensor, group: dist.ProcessGroup) -> Tensor:
        """See :class:`ReduceScatterInGraph`."""
        reduced: Tensor = REDUCE_SCATTER_IN_TREE(
            packed, self.reduce_scatter_op, group.size(), group.group_name
        )
        return reduced

    def all_reduce(self, packed: Tensor, group: dist.ProcessGroup) -> Tensor:
        """See :class:`ReduceScatterInGraph`."""
        reduced: Tensor = ALL_REDUCE_IN_TREE(packed, self.all_reduce_op, group.group_name)
        return reduced


class MicrobatchTree:
    """Adds the gradients of a rank's microbatches in the tree of :func:`canonical_reductions`.

    It adds two sums of equally many microbatches as soon as both are there, as a binary counter carries, so it keeps
    at most ``log2(num_microbatches) + 1`` copies of the sharded gradients::

        tree = graphpasses.MicrobatchTree(model)
        for j in range(num_microbatches // num_ranks):  # of the global batch
            loss = loss_fn(model, *microbatches[j * num_ranks + rank]) / num_microbatches
            loss.backward()  # or: loss = step(*microbatch), of a captured step
            tree.add()
        tree.finish()
        optimizer.step()
        optimizer.zero_grad()

    Args:
        model: on which :func:`canonical_reductions` was called.

    Raises:
        UnsupportedError: it was not; or, from :meth:`add`, a microbatch left no reduced gradients, or not of the same
            parameters as the one before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters: list[tuple[str, nn.Parameter, torch.dtype]] = []
        names = {id(parameter): fqn for fqn, parameter in named_sharded_parameters(model)}
        for group, read in read_groups(model).items():
            if (own := own_reduction(group)) is None:
                raise UnsupportedError(
                    f"FSDP2 group {read.name!r} adds ranks in NCCL's order; call canonical_reductions on the model"
                )
            added = accumulate_dtype(own.reduce_scatter_op, read.reduce_dtype)
            for parameter in (each.sharded_param for each in group.fsdp_params):
                self._parameters.append((names[id(parameter)], parameter, added))
        self._sums: list[
            tuple[int, list[Tensor | None]]
        ] = []  # of 2**level microbatches, and what they sum to
        self._finished: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self) -> None:
        """Takes the gradients of one microbatch out of ``.grad``, and adds them where the tree has them."""
        taken = [self._take(*each) for each in self._parameters]
        present = [each is not None for each in taken]
        if not any(present):
            raise UnsupportedError(
                "no parameter has a reduced gradient: call add() after each backward, with FSDP2's "
                "set_requires_gradient_sync(True)"
            )
        if self._sums:
            for (fqn, *_), now, before in zip(self._parameters, taken, self._sums[-1][1], strict=True):
                if (now is None) != (before is None):
                    raise UnsupportedError(
                        f"parameter {fqn!r} has a gradient in some microbatches and none in others, which FSDP2 does "
                        "not reduce to the same bits on any number of ranks. Use it in each, "
                        "e.g. multiplied by zero"
                    )
        level = 0
        while self._sums and self._sums[-1][0] == level:
            taken = _added(self._sums.pop()[1], taken)
            level += 1
        self._sums.append((level, taken))

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the sums into ``.grad``, and forgets them."""
        if not self._sums:
            raise UnsupportedError("no microbatch was added: call add() after each backward")
        total = self._sums.pop()[1]
        while self._sums:
            total = _added(self._sums.pop()[1], total)
        for (fqn, parameter, _), value in zip(self._parameters, total, strict=True):
            if value is not None:
                assert isinstance(parameter, DTensor)
                parameter.grad = self._finished[fqn] = DTensor.from_local(
                    value.to(parameter.dtype),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )

    def _take(self, fqn: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and gradient is self._finished.pop(fqn, None):
            raise UnsupportedError(
                f"the gradient of {fqn!r} still has the last step's sum: call optimizer.zero_grad() after each step"
            )
        return None if gradient is None else gradient.to_local().to(dtype)  # type: ignore[attr-defined]


def _added(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    return [None if a is None or b is None else a.add_(b) for a, b in zip(left, right, strict=True)]
