"""What surrounds a call of a compiled TorchRec model, so that Dynamo traces it as one graph, once.

A key-jagged tensor is made of what a batch holds (values, lengths, weights) and of what was computed from it and
cached. Dynamo would read the cached Python numbers as constants and compile each batch anew.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphpasses._torch.ddp import after_forward, before_forward, will_rebuild_buckets
from graphpasses._torch.dynamo_settings import InternalTorchDynamoError, change_settings, mark_any_length
from graphpasses.embedding.torchrec_patches import apply_patches, remove_patches
from graphpasses.errors import GraphPassesError, UnsupportedError

__all__ = [
    "DDPCalls",
    "ddp_calls",
    "keep_optimizer_steps",
    "needs_eager_call",
    "prepare_inputs",
    "tracing_scope",
]


@contextmanager
def tracing_scope() -> Iterator[None]:
    """Sets Dynamo and TorchRec up for whole graphs; after the block everything is as before.

    It may be nested. In it, sharded modules refuse features in another order than the one they were made for, in
    eager calls, too.

    Raises:
        KeyOrderError: see :func:`~graphpasses.embedding.torchrec_patches.check_key_order`.
        UnsupportedError: this version of TorchRec was not tested.

    Example:
        >>> with tracing_scope():
        ...     compiled(batch)  # doctest: +SKIP
    """
    apply_patches()
    undo_settings = change_settings()
    try:
        yield
    except InternalTorchDynamoError as error:
        # What traced code raises, Dynamo raises in its own words.
        if isinstance(error.__context__, GraphPassesError):
            raise error.__context__ from None
        raise
    finally:
        undo_settings()
        remove_patches()


def needs_eager_call(modules: Iterable[nn.Module]) -> bool:
    """Returns whether a sharded TorchRec module in ``modules`` has yet to make its input dist.

    It does so in its first call, from that call's features, and checks their values; none of this can be traced.
    """
    return any(
        getattr(module, name, False)
        for root in modules
        for module in root.modules()
        for name in ("_has_uninitialized_input_dist", "_has_uninitialized_input_dists")
    )


@contextmanager
def keep_optimizer_steps(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Sets the fused optimizers' numbers of steps back after forwards that are no steps.

    A TBE counts in its forward, on its device (which checkpoints keep) and on the host. Loaded numbers reach the host
    in its next eager forward, and so, for a model that has none, here.

    Example:
        >>> with keep_optimizer_steps([model]), torch.no_grad():
        ...     model(batch)  # doctest: +SKIP
    """
    found = (module for root in modules for module in _modules_and_lookups(root))
    tbes: list[Any] = [module for module in found if hasattr(module, "iter_cpu") and hasattr(module, "iter")]
    for tbe in tbes:
        if tbe.iter_cpu.item() == 0:
            tbe.iter_cpu.copy_(tbe.iter)
    steps = [(tbe.iter.clone(), tbe.iter_cpu.clone()) for tbe in tbes]
    try:
        yield
    finally:
        for tbe, (step, step_on_host) in zip(tbes, steps, strict=True):
            tbe.iter.copy_(step)
            tbe.iter_cpu.copy_(step_on_host)


# ---- DistributedDataParallel ---------------------------------------------------------------------------


@dataclass(frozen=True)
class DDPCalls:
    """What DistributedDataParallel modules do around their forward, to be done around a compiled call.

    In the graph a DistributedDataParallel is its module alone. Its reducer's hooks on the parameters are outside of
    the graph, and reduce gradients as in eager if the reducer was told of the forward.

    Args:
        modules: the DistributedDataParallel modules that the call runs, outer ones first.
    """

    modules: tuple[DistributedDataParallel, ...]

    def needs_eager_step(self) -> bool:
        """Returns whether the next step must run eager for its bits, which is so in the first two or three.

        DistributedDataParallel packs gradients in the order in which they came in an early step. An element's place
        decides the order in which more than two ranks' gradients are added.
        """
        return any(ddp.process_group.size() > 2 and will_rebuild_buckets(ddp) for ddp in self.modules)

    def before(self) -> None:
        """To be called before the compiled function."""
        for ddp in self.modules:
            before_forward(ddp)

    def after(self, outputs: Any) -> Any:
        """To be called with what the compiled function returned; returns what to give to the user instead."""
        for ddp in reversed(self.modules):
            outputs = after_forward(ddp, outputs)
        return outputs

    def in_order(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps what a backend made of a graph, so that the modules' all-reduces start in one order on all ranks.

        All gradients leave a compiled backward at once, and autograd accumulates them in an order that depends on
        how many there are. Each module's gradients but the first's go through a node of their own, which autograd
        runs after what is accumulated.
        """
        if len(self.modules) < 2:
            return compiled
        parameters = [[id(parameter) for parameter in ddp.parameters()] for ddp in self.modules[1:]]

        def run(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return compiled(*inputs)
            position = {id(value): index for index, value in enumerate(inputs)}
            values = list(inputs)
            for ids in reversed(parameters):  # autograd runs first what was made last
                indices = [position[item] for item in ids if item in position]
                aliases = _alias(*(values[index] for index in indices)) if indices else ()
                for index, alias in zip(indices, aliases, strict=True):
                    values[index] = alias
            return compiled(*values)

        return run


def ddp_calls(modules: Iterable[nn.Module]) -> DDPCalls:
    """Finds the DistributedDataParallel modules in ``modules``, themselves and data-parallel tables included.

    Raises:
        UnsupportedError: one of them casts its parameters in hooks (``mixed_precision=``).

    Example:
        >>> calls = ddp_calls([model])  # doctest: +SKIP
        >>> calls.before()  # doctest: +SKIP
        >>> outputs = calls.after(compiled(batch))  # doctest: +SKIP
    """
    found = (module for root in modules for module in _modules_and_lookups(root))
    ddps = tuple(dict.fromkeys(module for module in found if isinstance(module, DistributedDataParallel)))
    for ddp in ddps:
        if ddp.mixed_precision is not None:
            raise UnsupportedError(
                f"DistributedDataParallel(mixed_precision=...) around {type(ddp.module).__name__} cannot be "
                "compiled: its hooks cast parameters outside of the graph; use torch.autocast in the module instead"
            )
    return DDPCalls(ddps)


def _modules_and_lookups(root: nn.Module) -> Iterator[nn.Module]:
    """Yields all modules; sharded ones keep their lookups in a plain list, out of sight of ``modules()``."""
    for module in root.modules():
        yield module
        for lookup in vars(module).get("_lookups", ()):
            yield from lookup.modules()


# ---- inputs --------------------------------------------------------------------------------------------


def prepare_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces (key-)jagged tensors by ones without caches, whose number of values Dynamo does not look at.

    They are found in tuples, lists, dicts, dataclasses and TorchRec's ``Pipelineable`` objects. Nothing that the
    user holds changes: replaced objects are new, and their tensors share memory and gradients with the user's.

    Args:
        args: positional arguments of a model.
        kwargs: its keyword arguments.

    Returns:
        What to call the compiled function with; whatever holds no jagged tensor is the same object.

    Example:
        >>> prepare_inputs((torch.ones(2), [1, 2]), {})
        ((tensor([1., 1.]), [1, 2]), {})
    """
    jagged = sys.modules.get("torchrec.sparse.jagged_tensor")
    if jagged is None:
        return tuple(args), dict(kwargs)
    prepare = _Prepare(jagged)
    return tuple(map(prepare, args)), {name: prepare(value) for name, value in kwargs.items()}


class _Prepare:
    """Maps arguments; an object that occurs twice stays one object."""

    def __init__(self, jagged: Any) -> None:
        self._kinds: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            (Tensor, lambda tensor: tensor),
            (jagged.KeyedJaggedTensor, _prepare_keyed),
            (jagged.JaggedTensor, _prepare_jagged),
            (tuple, self._prepare_tuple),
            (list, lambda items: self._replace(items, enumerate(items), list.__setitem__)),
            (dict, lambda items: self._replace(items, items.items(), dict.__setitem__)),
            (jagged.Pipelineable, self._prepare_attributes),
        )
        self._done: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = self._prepare(value)
        return self._done[id(value)]

    def _prepare(self, value: Any) -> Any:
        for kind, prepare in self._kinds:
            if isinstance(value, kind):
                return prepare(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._prepare_attributes(value)
        return value

    def _prepare_tuple(self, value: Any) -> Any:
        items = tuple(map(self, value))
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)

    def _prepare_attributes(self, value: Any) -> Any:
        names = (
            vars(value) if hasattr(value, "__dict__") else [item.name for item in dataclasses.fields(value)]
        )
        items = [(name, getattr(value, name)) for name in names]
        return self._replace(value, items, object.__setattr__)

    def _replace(self, value: Any, items: Iterable[tuple[Any, Any]], set_item: Callable[..., None]) -> Any:
        changes = [(key, new) for key, old in items if (new := self(old)) is not old]
        if changes:
            value = copy.copy(value)
        for key, new in changes:
            set_item(value, key, new)
        return value


class _Aliases(torch.autograd.Function):
    """The same memory and gradients as other tensors, without being their views: Dynamo looks at a view's base."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


def _alias(*tensors: Tensor) -> tuple[Tensor, ...]:
    aliases: tuple[Tensor, ...] = _Aliases.apply(*tensors)  # type: ignore[no-untyped-call]
    return aliases


def _any_length(tensor: Tensor | None) -> Tensor | None:
    """Returns an alias of a tensor whose dim 0 Dynamo treats as unknown; the user's tensor stays unmarked."""
    if tensor is None:
        return None
    (alias,) = _alias(tensor) if tensor.requires_grad else (tensor.detach(),)
    mark_any_length(alias)
    return alias


def _lengths(jagged: Any) -> Tensor:
    lengths: Tensor | None = jagged.lengths_or_none()
    return torch.diff(jagged.offsets_or_none()) if lengths is None else lengths


def _prepare_jagged(jagged: Any) -> Any:
    return type(jagged)(
        values=_any_length(jagged.values()),
        weights=_any_length(jagged.weights_or_none()),
        lengths=_lengths(jagged),
    )


def _prepare_keyed(jagged: Any) -> Any:
    # With batch sizes per key there is a length per distinct sample: their number varies, too.
    is_variable = jagged.variable_stride_per_key()
    prepared = type(jagged)(
        keys=jagged.keys(),
        values=_any_length(jagged.values()),
        weights=_any_length(jagged.weights_or_none()),
        lengths=_any_length(_lengths(jagged)) if is_variable else _lengths(jagged),
        stride=None if is_variable else jagged._stride,
        stride_per_key_per_rank=jagged._stride_per_key_per_rank if is_variable else None,
        inverse_indices=jagged.inverse_indices_or_none(),
    )
    if not is_variable:
        prepared.stride()  # Kept in it, so that Dynamo sees one number, which it guards.
    return prepared
