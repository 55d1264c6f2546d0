"""Bucket plans: which parameters eager FSDP2 gathers and reduces in one collective, and in which order.

An element's byte offset in its bucket decides its NCCL ring, hence the order of addition, hence its bits. Which bytes
each parameter takes follows from this order and its shape: see ``make_bucket_layout`` in ``layout.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from graphpasses.errors import PlanError
from graphpasses.identity import IdentityMap
from graphpasses.ops.reduce_in_tree import is_tree_op
from graphpasses.text import did_you_mean

_ROOT = "(root)"


@dataclass(frozen=True)
class Reduction:
    """How the gradients of a bucket are reduced.

    The packed gradients are cast to ``dtype``, divided by ``predivide``, reduce-scattered, with HSDP
    all-reduced, divided by ``postdivide``, and only then cast to the parameter's dtype.
    Source: FSDP2's ``_fsdp_collectives.py``, ``foreach_reduce`` and ``_get_gradient_divide_factors``.

    Args:
        reduce_scatter_op: op of the reduce-scatter: ``"avg"``, ``"sum"``, or ``"tree"``, which is the sum as
            :func:`~graphpasses.canonical_reductions` adds it.
        all_reduce_op: op of HSDP's all-reduce; unused without HSDP.
        predivide: divisor before the collectives, or None.
        postdivide: divisor after the collectives, or None.
        dtype: dtype on the wire; None leaves the graph's.
        is_premultiplied: whether eager asks NCCL for PREMUL_SUM by one instead of the sum.

    Raises:
        PlanError: an op is not known, the all-reduce averages after the reduce-scatter summed, which FSDP2 never
            does, or a divisor is not positive.

    Example:
        >>> default = Reduction()
        >>> force_sum = Reduction("sum", "sum", postdivide=4.0, dtype=torch.float32)
    """

    reduce_scatter_op: str = "avg"
    all_reduce_op: str = "avg"
    predivide: float | None = None
    postdivide: float | None = None
    dtype: torch.dtype | None = None
    is_premultiplied: bool = False

    def __post_init__(self) -> None:
        for name in ("reduce_scatter_op", "all_reduce_op"):
            if (op := getattr(self, name)) not in ("avg", "sum") and not is_tree_op(op):
                raise PlanError(f"{name} must be 'avg', 'sum' or 'tree', not {op!r}")
        if (self.reduce_scatter_op, self.all_reduce_op) == ("sum", "avg"):
            raise PlanError("reduce_scatter_op 'sum' goes with all_reduce_op 'sum', not 'avg'")
        for name in ("predivide", "postdivide"):
            if (divisor := getattr(self, name)) is not None and not divisor > 0:
                raise PlanError(f"{name} must be positive or None, not {divisor!r}")


@dataclass(frozen=True)
class Bucket:
    """Parameters that share one collective: those of the modules of one ``fully_shard`` call, or listed one by one.

    Args:
        fqns: FQNs of modules (``""`` is the root), or of parameters in byte order, frozen ones included.
        kind: what the FQNs name. Those of a bucket that :meth:`BucketPlan.resolve` returns are canonical names of
            parameters, unless it accumulates.
        reduction: how its gradients are reduced; None leaves what was captured.
        name: for messages; by default the FQNs.
        reshard_after_forward: whether backward gathers its parameters again, as ``fully_shard``'s argument.
        reduces_unused: whether eager reduces zeros for its trainable parameters without a gradient, as FSDP2's
            ``set_reduce_scatter_unused_params``.
        accumulates: whether the step calls backward on its parameters several times, and
            ``set_requires_gradient_sync`` is off until the last: FSDP2 then adds in the reduction's dtype. The FQNs
            of parameters are then the names under which the step has these gradients; under its others a tied
            parameter may be in another bucket.

    Raises:
        PlanError: ``fqns`` is empty.

    Example:
        >>> Bucket(("layers.0", "layers.1"), reshard_after_forward=True).name
        'layers.0, layers.1'
    """

    fqns: tuple[str, ...]
    kind: Literal["modules", "parameters"] = "modules"
    reduction: Reduction | None = None
    name: str = ""
    reshard_after_forward: bool = False
    reduces_unused: bool = False
    accumulates: bool = False

    def __post_init__(self) -> None:
        if not self.fqns:
            raise PlanError(f"a plan entry is empty; it must name at least one of the {self.kind}")
        if not self.name:
            object.__setattr__(self, "name", ", ".join(fqn or _ROOT for fqn in self.fqns))


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a model, as the ``fully_shard`` calls of the eager run make them.

    Args:
        entries: the buckets.
        root: whether the eager run also wraps the root module, which puts the parameters of no entry in one
            last bucket. FSDP2's users always do.
        root_reduction: reduction of that last bucket.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        >>> for bucket in BucketPlan.from_modules([["0"], ["1"]]).resolve(model):
        ...     print(bucket.name, bucket.fqns)
        0 ('0.weight', '0.bias')
        1 ('1.weight', '1.bias')
        (root) ('2.weight',)
    """

    entries: tuple[Bucket, ...]
    root: bool = True
    root_reduction: Reduction | None = None

    @classmethod
    def from_modules(
        cls,
        entries: Iterable[Sequence[str]],
        reduction: Reduction | None = None,
        *,
        root: bool = True,
        reshard_after_forward: bool = True,
    ) -> BucketPlan:
        """Makes a plan from the modules of each ``fully_shard`` call; no model is needed.

        Args:
            entries: per call the FQNs of its modules, in argument order; ``""`` is the root. A module inside
                another entry's module makes a bucket of its own, as calling bottom-up does.
            reduction: reduction of every bucket.
            root: see the class.
            reshard_after_forward: argument of those calls. The root's bucket is never resharded, FSDP2's default.

        Raises:
            PlanError: an entry is empty.
        """
        made = (
            Bucket(
                _names(entry), reduction=reduction, reshard_after_forward=reshard_after_forward and "" not in entry
            )
            for entry in entries
        )
        return cls(tuple(made), root=root, root_reduction=reduction)

    @classmethod
    def from_parameters(cls, entries: Iterable[Sequence[str]], reduction: Reduction | None = None) -> BucketPlan:
        """Makes a plan with an explicit order; parameters that are not named are in no bucket.

        Args:
            entries: per bucket the FQNs of its parameters in byte order.
            reduction: reduction of every bucket.

        Raises:
            PlanError: an entry is empty.
        """
        made = (
            Bucket(_names(entry), "parameters", reduction, name=f"bucket {index}")
            for index, entry in enumerate(entries)
        )
        return cls(tuple(made), root=False)

    @classmethod
    def per_block(
        cls, model: nn.Module, reduction: Reduction | None = None, *, reshard_after_forward: bool = True
    ) -> BucketPlan:
        """Makes the usual plan: one bucket per block, and the root's.

        A block is a child of an outermost ``nn.ModuleList`` or ``nn.ModuleDict`` that owns parameters.

        Args:
            model: the model, only looked at.
            reduction: reduction of every bucket.
            reshard_after_forward: as in :meth:`from_modules`.

        Example:
            >>> model = nn.Module()
            >>> model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            >>> [entry.fqns for entry in BucketPlan.per_block(model).entries]
            [('layers.0',), ('layers.1',)]
        """
        blocks: list[Sequence[str]] = []
        inside = set[nn.Module]()
        for fqn, module in model.named_modules():
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and module not in inside:
                for name, block in module.named_children():
                    if block not in inside and next(nn.Module.parameters(block), None) is not None:
                        blocks.append([f"{fqn}.{name}" if fqn else name])
                    inside.update(block.modules())
        return cls.from_modules(blocks, reduction, reshard_after_forward=reshard_after_forward)

    @classmethod
    def from_fully_shard(cls, model: nn.Module) -> BucketPlan:
        """Reads the plan of a model that ``fully_shard`` was applied to, reductions and dtypes included.

        Args:
            model: the eager model, sharded; it need not have run.

        Returns:
            A plan by parameters, nested buckets before the ones around them and the root's last.

        Raises:
            PlanError: ``fully_shard`` was applied to no module of the model.
            UnsupportedError: a group reduces in a way that no functional collective can express.
            LayoutError: a group's trainable parameters have several dtypes.

        Example:
            >>> from torch.distributed.fsdp import fully_shard
            >>> with fake_process_group(2):
            ...     model = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (2,)))
            ...     plan = BucketPlan.from_fully_shard(model)
            >>> [bucket.fqns for bucket in plan.entries]
            [('weight', 'bias')]
        """
        from graphpasses._torch.fsdp2 import read_groups

        groups = read_groups(model).values()
        if not groups:
            raise PlanError(
                "the model has no FSDP2 parameter group; call fully_shard on it first, or give the buckets yourself, "
                "e.g. with BucketPlan.from_modules"
            )
        entries = (
            Bucket(
                fqns=tuple(parameter.fqn for parameter in group.parameters),
                kind="parameters",
                reduction=Reduction(
                    group.reduce_scatter_op,
                    group.all_reduce_op,
                    group.predivide,
                    group.postdivide,
                    group.reduce_dtype,
                    group.is_premultiplied,
                ),
                name=group.name,
                reshard_after_forward=group.reshards_after_forward,
                reduces_unused=group.reduces_unused,
            )
            for group in groups
        )
        return cls(tuple(entries), root=False)

    def resolve(self, model: nn.Module) -> tuple[Bucket, ...]:
        """Finds each bucket's parameters, in the order in which eager FSDP2 packs them.

        Args:
            model: the plain, SimpleFSDP or FSDP2 model; only looked at.

        Returns:
            One bucket by parameters per entry, in the order of the entries, then the root's. Entries without
            parameters of their own make none, as in FSDP2.

        Raises:
            PlanError: an entry names nothing in the model, two entries hold one parameter, or a tied
                parameter has names in two entries, which eager FSDP2 rejects at the first forward.

        Example:
            >>> attention = nn.MultiheadAttention(4, 2)  # its own weights and a child's
            >>> BucketPlan.from_modules([[""]]).resolve(attention)[0].fqns
            ('out_proj.weight', 'out_proj.bias', 'in_proj_weight', 'in_proj_bias')
        """
        identity = IdentityMap.of(model)
        _check_names(self.entries, identity)
        entries = self.entries
        if self.root and not any(entry.kind == "modules" and "" in entry.fqns for entry in entries):
            entries += (Bucket(("",), reduction=self.root_reduction),)
        calls = [entry.fqns if entry.kind == "modules" else () for entry in entries]

        buckets: list[Bucket] = []
        taken: dict[str, tuple[str, int]] = {}
        for index, (entry, managed) in enumerate(zip(entries, _managed_parameters(model, calls), strict=True)):
            fqns: dict[str, None] = {}
            for name in managed if entry.kind == "modules" else entry.fqns:
                fqn = name if entry.accumulates else identity.canonical(name)
                other_name, other = taken.setdefault(fqn, (name, index))
                if other != index:
                    raise PlanError(_conflict(other_name, entries[other].name, name, entry.name))
                fqns[fqn] = None
            if fqns:
                buckets.append(replace(entry, fqns=tuple(fqns), kind="parameters"))
        return tuple(buckets)


def premultiplied_note(buckets: Iterable[Bucket]) -> str | None:
    """Says in which buckets eager asks NCCL for another reduction than the graph does, and what to set.

    FSDP2 with a gradient divide factor of 1, as torchtitan sets it, asks for PREMUL_SUM by one. Functional
    collectives have SUM alone, which has its bits if NCCL takes the same algorithm; NVLS and PAT have no PREMUL_SUM.
    Source: NCCL ``src/include/device.h`` (``ncclNvlsSupported``), ``src/enqueue.cc`` (``updateCollCostTable``).
    """
    names = [bucket.name for bucket in buckets if bucket.reduction and bucket.reduction.is_premultiplied]
    if not names:
        return None
    return (
        f"eager asks NCCL for PREMUL_SUM by one, this step for SUM, in {len(names)} buckets ({names[0]!r} first). "
        "Their bits are equal unless NCCL takes NVLS or PAT for SUM: where the machine has those, set "
        "NCCL_NVLS_ENABLE=0 and NCCL_PAT_ENABLE=0 for both, or call set_force_sum_reduction_for_comms(True) on the "
        "eager model"
    )


def _managed_parameters(model: nn.Module, calls: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns which parameters each ``fully_shard`` call manages, in byte order.

    FSDP2's rule for one call: from each module in argument order a depth-first post-order over ``children()``,
    shared modules once, without modules that another call takes; then each module's own parameters; a parameter
    stands where it is first seen. A module's own parameters thus come after those of its children, unlike in
    ``named_parameters()``.
    Source: FSDP2's ``_fsdp_init.py``, ``_get_managed_modules`` and ``_get_managed_states``; ``_get_root_modules``.

    ``calls`` has per call the FQNs of its modules, in argument order; ``""`` is the root. A tied parameter is
    listed under each of its names; the first decides.
    """
    roots = [_root_modules([model.get_submodule(fqn) for fqn in call]) for call in calls]
    taken = frozenset(module for modules in roots for module in modules)
    fqns = {module: fqn for fqn, module in model.named_modules()}
    return [
        [
            name
            for module in _managed_modules(modules, taken)
            for name, _ in module.named_parameters(prefix=fqns[module], recurse=False)
        ]
        for modules in roots
    ]


def _root_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns a call's modules but those inside others of it."""
    nested = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if module not in nested]


def _managed_modules(roots: Sequence[nn.Module], taken: frozenset[nn.Module]) -> Iterator[nn.Module]:
    visited = set[nn.Module]()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        visited.add(module)
        for child in module.children():
            if child not in visited and child not in taken:
                yield from visit(child)
        yield module

    for root in roots:
        yield from visit(root)


def _names(entry: Sequence[str]) -> tuple[str, ...]:
    if isinstance(entry, str):
        raise PlanError(f"a plan entry must be a list of FQNs, not the string {entry!r}")
    return tuple(entry)


def _check_names(entries: Iterable[Bucket], identity: IdentityMap) -> None:
    known = {
        "modules": {name for aliases in identity.modules for name in aliases},
        "parameters": {name for aliases in identity.parameters for name in aliases},
    }
    for entry in entries:
        for fqn in entry.fqns:
            if fqn not in known[entry.kind]:
                raise PlanError(
                    f"plan entry {entry.name!r}: the model has no {entry.kind.removesuffix('s')} {fqn!r}"
                    + did_you_mean(fqn, known[entry.kind])
                )


def _conflict(name: str, entry: str, other_name: str, other_entry: str) -> str:
    if name == other_name:
        return f"parameter {name!r} is in two plan entries: {entry!r} and {other_entry!r}"
    return (
        f"tied parameters {name!r} and {other_name!r} are in different plan entries: {entry!r} and "
        f"{other_entry!r}; eager FSDP2 rejects this at the first forward, so name the modules of both in one "
        "entry, as in fully_shard([a, b])"
    )
