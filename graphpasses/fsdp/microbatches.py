"""Which microbatches of a global batch a rank has, and how their gradients are added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Sampler

from graphpasses._torch.dtensor import as_dtensor, local_part
from graphpasses._torch.fsdp2 import own_reduction, read_groups
from graphpasses._torch.fsdp2_parameters import named_sharded_parameters
from graphpasses._torch.group_ranks import rank_of_world
from graphpasses._torch.storage import times_written
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.graph_layout import reduced_parts
from graphpasses.graph import TrainGraph, argument
from graphpasses.graph.parameters import get_state
from graphpasses.ops.reduce_in_tree import accumulate_dtype, is_tree_op


class MicrobatchSampler(Sampler[list[int]]):
    """Deals the microbatches of global batches to ranks, so that each holds the same samples on any number of them.

    Microbatch ``k`` has samples ``k * microbatch_size`` and following of ``sampler``, and goes to rank
    ``k % num_ranks``. Give it to ``DataLoader(dataset, batch_sampler=...)``. torch's ``DistributedSampler`` deals
    samples, not microbatches: what a microbatch holds then depends on the number of ranks.

    Args:
        sampler: indices of samples, in the same order on all ranks; what fills no global batch is left out.
        microbatch_size: samples in one.
        num_microbatches: of a global batch, which the number of ranks divides.
        rank: by default that of the default process group.
        num_ranks: likewise.

    Raises:
        UnsupportedError: the ranks do not divide ``num_microbatches``.

    Example:
        >>> [list(MicrobatchSampler(range(9), 2, 4, rank=rank, num_ranks=2)) for rank in (0, 1)]
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """

    def __init__(
        self,
        sampler: Iterable[int],
        microbatch_size: int,
        num_microbatches: int,
        *,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        own, num = rank_of_world()
        self._rank, self._num_ranks = own if rank is None else rank, num_ranks or num
        if num_microbatches % self._num_ranks:
            raise UnsupportedError(
                f"{self._num_ranks} ranks do not divide the {num_microbatches} microbatches of a global batch"
            )
        self._sampler, self._size, self._num = sampler, microbatch_size, num_microbatches

    def __iter__(self) -> Iterator[list[int]]:
        global_batch: list[int] = []
        for index in self._sampler:
            global_batch.append(index)
            if len(global_batch) == self._size * self._num:
                for k in range(self._rank, self._num, self._num_ranks):
                    yield global_batch[k * self._size : (k + 1) * self._size]
                global_batch = []


class MicrobatchTree:
    """Adds the gradients of a rank's microbatches in the tree of :func:`canonical_reductions`.

    It adds two sums of equally many microbatches as soon as both are there, as a binary counter carries, so it keeps
    at most ``log2(num_microbatches) + 1`` copies of the sharded gradients::

        tree = graphpasses.MicrobatchTree(model)
        for microbatch in microbatches[rank::num_ranks]:  # of the global batch
            (loss_fn(model, *microbatch) / num_microbatches).backward()  # or step(*microbatch), of a captured step
            tree.add()
        tree.finish()  # then optimizer.step() and optimizer.zero_grad()

    Args:
        model: on which :func:`canonical_reductions` was called; or a captured step that
            ``default_pipeline(canonical=True)`` rewrote, whose gradients it adds.
        parameters: FQNs, sharded parameters whose gradients come reduced in a tree by other means, and the dtypes to
            add them in; None: what the model or the step says.
        counts: FQNs of buffers in which forward counts, as routers of experts do; each rank has those of its own
            microbatches, and whoever reads them adds those of all ranks first. Sums of whole numbers have no order.

    Raises:
        UnsupportedError: neither was done, or there is no such buffer; or, from :meth:`add`, a microbatch left no
            reduced gradients, or not of the same parameters as the one before, or wrote another buffer; or, from
            :meth:`finish`, counts are no whole numbers, or so large that their sum is rounded.
    """

    def __init__(
        self,
        model: nn.Module | TrainGraph,
        parameters: Iterable[tuple[str, Tensor, torch.dtype]] | None = None,
        counts: Iterable[str] = (),
    ) -> None:
        if parameters is None:
            parameters = _of_model(model) if isinstance(model, nn.Module) else _of_step(model)
        self._parameters = list(parameters)
        self._model = model if isinstance(model, nn.Module) else model.model
        self._counts = tuple(counts)
        if unknown := set(self._counts) - {fqn for fqn, _ in self._model.named_buffers()}:
            raise UnsupportedError(f"counts= names {sorted(unknown)}, which the model has no buffers of")
        self._buffers = self._written()
        self._sums: list[tuple[int, list[Tensor | None]]] = []  # of 2**level microbatches, and their sum
        self._finished: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self) -> None:
        """Takes the gradients of one microbatch out of ``.grad``, and adds them where the tree has them."""
        for fqn, version in self._written().items():
            if self._buffers.setdefault(fqn, version) != version:
                raise UnsupportedError(
                    f"a microbatch writes the buffer {fqn!r} (as batch statistics and routers' counts are), which "
                    "then depends on which microbatches a rank has. Let forward leave it as it is, e.g. by eval() of "
                    "its module, write it from what all ranks have, after finish(), or name it in counts= if it "
                    "counts, in whole numbers that all ranks add up before they are read"
                )
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
        self._check_counts()
        total = self._sums.pop()[1]
        while self._sums:
            total = _added(self._sums.pop()[1], total)
        for (fqn, parameter, _), value in zip(self._parameters, total, strict=True):
            if value is not None:
                assert isinstance(parameter, DTensor)
                parameter.grad = self._finished[fqn] = as_dtensor(value.to(parameter.dtype), parameter)

    def _written(self) -> dict[str, tuple[int, int]]:
        """Returns by FQN which tensor a buffer is, and how often it was written; those that count are left out."""
        buffers = self._model.named_buffers()
        return {fqn: (id(each), times_written(each)) for fqn, each in buffers if fqn not in self._counts}

    def _check_counts(self) -> None:
        """Raises on all ranks alike, of which each has other counts."""
        if not self._counts:
            return
        buffers = {fqn: local_part(self._model.get_buffer(fqn)) for fqn in self._counts}
        values = [buffer.double() for buffer in buffers.values()]
        facts = torch.stack([torch.stack([(each != each.round()).sum(), each.abs().max()]) for each in values])
        if dist.is_initialized():
            dist.all_reduce(facts)
        for (fqn, buffer), (num_parts, most) in zip(buffers.items(), facts.tolist(), strict=True):
            exact = 2 / torch.finfo(buffer.dtype).eps if buffer.is_floating_point() else math.inf
            if num_parts or not most <= exact:
                raise UnsupportedError(
                    f"the counts in the buffer {fqn!r} are no whole numbers, or together reach {most:.0f}, and "
                    f"{buffer.dtype} adds whole numbers exactly up to {exact:.0f}. Count in a wider dtype, set the "
                    "counts back after each step, or do not name it in counts="
                )

    def _take(self, fqn: str, parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and gradient is self._finished.pop(fqn, None):
            raise UnsupportedError(
                f"the gradient of {fqn!r} still has the last step's sum: call optimizer.zero_grad() after each step"
            )
        return None if gradient is None else gradient.to_local().to(dtype)  # type: ignore[attr-defined]


def _of_model(model: nn.Module) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    names = {id(parameter): fqn for fqn, parameter in named_sharded_parameters(model)}
    for group, read in read_groups(model).items():
        if (own := own_reduction(group)) is None:
            raise UnsupportedError(
                f"FSDP2 group {read.name!r} adds ranks in NCCL's order; call canonical_reductions on the model, or "
                "give the captured step, if default_pipeline(canonical=True) rewrote it"
            )
        added = accumulate_dtype(own.reduce_scatter_op, read.reduce_dtype)
        for parameter in (each.sharded_param for each in group.fsdp_params):
            yield names[id(parameter)], parameter, added


def _of_step(step: TrainGraph) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    added: dict[str, torch.dtype] = {}
    for node, parts in reduced_parts(step).items():
        if is_tree_op(op := node.args[1]):
            dtype = accumulate_dtype(str(op), argument(node).meta["val"].dtype)
            added |= {fqn: dtype for fqn, _ in parts.values()}
    for fqn in step.gradient_slots():
        if fqn in added:
            yield fqn, get_state(step.model, fqn), added[fqn]
        elif fqn not in step.without_gradient:
            raise UnsupportedError(
                f"the step adds the gradient of {fqn!r} in NCCL's order, or reduces it over one rank. Rewrite it by "
                "default_pipeline(canonical=True); on one rank, call canonical_reductions on the model before the "
                "capture, and give the model"
            )


def _added(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    return [None if a is None or b is None else a.add_(b) for a, b in zip(left, right, strict=True)]
