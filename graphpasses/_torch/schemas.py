"""What operators say of themselves, what AOTAutograd makes of one that writes, and kernels for tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import auto_functionalize
from torch._library import simple_registry
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SET_GRAD_ENABLED = torch._C._set_grad_enabled

# Their schemas do not say that they write the running statistics that they are given. Source: ATen's kernels.
_WRITE_RUNNING_STATISTICS = (
    "aten::_batch_norm_impl_index", "aten::batch_norm", "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_update_stats", "aten::cudnn_batch_norm",
    "aten::instance_norm", "aten::miopen_batch_norm", "aten::native_batch_norm",
)  # fmt: skip
for _packet in (getattr(torch.ops.aten, name.removeprefix("aten::")) for name in _WRITE_RUNNING_STATISTICS):
    for _name in _packet.overloads():  # so that they stay where nobody reads what they normalize
        fx.node.has_side_effect(getattr(_packet, _name))


def is_operator(target: Any) -> bool:
    """Whether the target of a call is one overload of an operator, as in graphs of ATen."""
    return isinstance(target, torch._ops.OpOverload)


def has_schemas(target: Any) -> bool:
    """Whether the target of a call is an operator, or a packet of its overloads."""
    return isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def is_higher_order(node: fx.Node) -> bool:
    """Whether a call is given graphs to run, as that of an ``autograd.Function`` is."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def is_tensor_subclass(value: Any) -> bool:
    """Whether a value wraps tensors, as a DTensor does."""
    return is_traceable_wrapper_subclass(value)


def inner_names(value: torch.Tensor) -> list[str]:
    """Returns the attributes of a tensor subclass that hold its tensors."""
    names: list[str] = value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return names


def schemas(target: Any) -> list[Any]:
    """Returns the schemas of an operator: one of an overload, those of all overloads of a packet; otherwise none."""
    return [target._schema] if is_operator(target) else [each._schema for each in _overloads(target)]


def given_arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yields ``(argument of the schema, value)`` for what a call is given; for each overload that it may be."""
    return bound_arguments(node.target, node.args, node.kwargs)


def bound_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields likewise for what a target is called with."""
    for overload in _overloads(target):
        for index, argument in enumerate(_arguments(overload)):
            if index < len(args):
                yield argument, args[index]
            elif argument.name in kwargs:
                yield argument, kwargs[argument.name]


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of a call of an operator that has one overload, defaults too, by their names."""
    return named_values(node.target, node.args, node.kwargs)


def named_values(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns likewise what an operator is called with: arguments that equal their default are not always passed."""
    (overload,) = _overloads(target)
    defaults = {argument.name: argument.default_value for argument in _arguments(overload)}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def bind_named(op: Any, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns ``(args, kwargs)`` of a call of an operator from its arguments by name, but for defaults."""
    (schema,) = schemas(op)
    given = {each.name: each.default_value for each in schema.arguments if each.has_default_value()} | {**values}
    args = tuple(given[each.name] for each in schema.arguments if not each.kwarg_only)
    return args, {each.name: given[each.name] for each in schema.arguments if each.kwarg_only}


@cache
def returns_alias(target: Any) -> bool:
    """Whether an operator says that what it returns may share memory with an argument."""
    return any(output.alias_info is not None for schema in schemas(target) for output in schema.returns)


@cache
def writes_arguments(target: Any) -> bool:
    """Whether an operator says that it writes an argument."""
    return any(schema.is_mutable for schema in schemas(target))


@cache
def out_of_place_view(target: Any) -> Any:
    """Returns what makes a view as an operator, e.g. ``squeeze_``, changes its operand's shape; None for others."""
    if not is_operator(target) or torch.Tag.inplace_view not in target.tags:
        return None
    _, name, overload = str(target).split(".")
    for each in (overload, "int"):  # transpose_ has one overload, transpose several
        view = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), each, None)
        if view is not None and returns_alias(view):
            return view
    return None


@cache
def changes_memory(target: Any) -> bool:
    """Whether an operator gives its operand other memory, as ``set_`` and ``resize_`` do."""
    changes = is_operator(target) and torch.Tag.inplace_view in target.tags
    return changes and out_of_place_view(target) is None


@cache
def says_where(target: Any) -> bool:
    """Whether an operator is told where in its operand's memory it reads, also beside that, as ``as_strided`` is."""
    names = {argument.name for schema in schemas(target) for argument in schema.arguments}
    return is_operator(target) and {"size", "stride"} <= names and not target._schema.name.startswith("aten::new_")


@cache
def written_names(target: Any) -> frozenset[str]:
    """Returns the names of the arguments that an operator writes, also where its schema does not say so."""
    every = [(each.name, argument) for each in schemas(target) for argument in each.arguments]
    written = {argument.name for _, argument in every if argument.is_write}
    running = {argument.name for name, argument in every if name in _WRITE_RUNNING_STATISTICS}
    return frozenset(written.union(name for name in running if name.startswith("running_")))


def is_seeded(target: Any) -> bool:
    """Whether an operator says that it draws random numbers, or has the name of one of ATen's that does."""
    return is_operator(target) and _is_seeded(target)


@cache
def _is_seeded(target: torch._ops.OpOverload) -> bool:
    is_named_so = target.namespace != "aten" and target._schema.name.partition("::")[2].rstrip("_") in random_names()
    return is_named_so or torch.Tag.nondeterministic_seeded in target.tags


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers. Attention's operators say that they do, and without dropout do not."""
    return is_seeded(node.target) and named_arguments(node).get("dropout_p") != 0


@cache
def random_names() -> frozenset[str]:
    """Returns the names of ATen's operators that draw random numbers, such as ``"bernoulli"``."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    packets = [getattr(torch.ops.aten, name[6:]) for name in names if name.startswith("aten::")]
    return frozenset(packet.__name__.rstrip("_") for packet in packets if any(map(is_seeded, _overloads(packet))))


def _overloads(target: Any) -> list[Any]:
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    return []


@cache  # as torch makes new Python objects of a schema's parts each time
def _arguments(overload: torch._ops.OpOverload) -> tuple[Any, ...]:
    return tuple(overload._schema.arguments)


AUTO_FUNCTIONALIZED = auto_functionalize.auto_functionalized_v2

aten = torch.ops.aten


@dataclass(frozen=True)
class WrittenView:
    """An argument that an operator writes: base number ``base``, or ``view(base, *args)``."""

    base: int
    view: torch._ops.OpOverload | None = None
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FunctionalizedCall:
    """``auto_functionalized_v2(op, …)``: ``op`` writes copies of ``bases``; returns its results and the copies."""

    op: torch._ops.OpOverload
    bases: tuple[fx.Node, ...]  # the tensors of which it writes all or views
    reads: Mapping[str, Any]  # its other arguments, by name
    # The arguments that it writes, by name: a :class:`WrittenView`, a list of such, or None.
    writes: Mapping[str, Any]
    num_results: int  # number of outputs before the copies; 1, which is None, where ``op`` returns nothing


def read_functionalized_call(node: fx.Node) -> FunctionalizedCall | None:
    """Returns what a call of ``auto_functionalized_v2`` calls; None for another node, and for ``out=`` operators."""
    if node.target is not AUTO_FUNCTIONALIZED or not node.kwargs["_all_bases"]:
        return None
    op = node.args[0]
    if not isinstance(op, torch._ops.OpOverload):
        return None
    reads = dict(node.kwargs)
    bases: Any = reads.pop("_all_bases")
    names, types = auto_functionalize.get_mutable_args(op)
    views = auto_functionalize.read_view_information_from_args(names, types, reads, bases)
    writes = {
        name: list(map(_written_view, view)) if isinstance(view, list) else _written_view(view)
        for name, view in views.items()
    }
    return FunctionalizedCall(op, tuple(bases), reads, writes, max(len(op._schema.returns), 1))


def _written_view(info: auto_functionalize.ViewInfo | None) -> WrittenView | None:
    match info:
        case None:
            return None
        case auto_functionalize.AliasViewInfo():
            return WrittenView(info.base_index, aten.alias.default)
        case auto_functionalize.SliceViewInfo():
            return WrittenView(info.base_index, aten.slice.Tensor, (info.dim, info.start, info.end))
        case auto_functionalize.AsStridedViewInfo():
            args = (info.size, info.stride, info.storage_offset)
            return WrittenView(info.base_index, aten.as_strided.default, args)
        case _:
            return WrittenView(info.base_index)


# A kernel that reads the arguments of a call by their names in the operator's schema.
Rule = Callable[[SimpleNamespace], Any]


def operator_names(namespace: str) -> list[str]:
    """Returns the sorted full names, e.g. ``"aten::add.Tensor"``, of the operators of one library."""
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::"))


def has_kernel(name: str, *dispatch_keys: str) -> bool:
    """Returns whether an operator has a kernel of its own for one of ``dispatch_keys``, e.g. ``"CPU"``."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in dispatch_keys)


class TracingKernels:
    """Kernels that tracers run for operators of a library that have none; eager calls do not see them."""

    def __init__(self, namespace: str) -> None:
        self._library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._undo: list[Callable[[], object]] = []

    def add_fake(self, name: str, rule: Rule) -> None:
        """Adds a fake kernel to an operator that has none; ``rule`` is as for ``torch.library.register_fake``."""
        holder = simple_registry.singleton.find(name).fake_impl
        source = f"{rule.__module__}.{rule.__qualname__}"
        handle = holder.register(_kernel(name, rule), source, lib=self._library, allow_override=False)
        self._undo.append(handle.destroy)

    def add_autograd(self, name: str, rule: Rule) -> None:
        """Replaces an operator's autograd on CPU for tracers; ``rule`` may call it again :func:`below_autograd`."""
        overload, key = _overload(name), torch.DispatchKey.AutogradCPU

        def undo() -> None:
            del overload.py_kernels[key]
            overload._dispatch_cache.clear()

        # Python kernels of an overload run under the Python dispatcher only, which tracers turn on.
        overload.py_impl(key)(_kernel(name, rule))
        self._undo.append(undo)

    def remove(self) -> None:
        """Removes all of them."""
        while self._undo:
            self._undo.pop()()
        self._library._destroy()  # type: ignore[no-untyped-call]


def below_autograd() -> AbstractContextManager[None]:
    """Returns a context in which operators skip their autograd kernels."""
    return torch._C._AutoDispatchBelowAutograd()


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, _, packet = name.partition("::")
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), packet).default
    return overload


def _kernel(name: str, rule: Rule) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return rule(SimpleNamespace(**named_values(_overload(name), args, kwargs)))

    return kernel
