"""What is compared of operators: of their arguments and results, which compute nothing, and which the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers an operator that is named below. Tested: 2.13.
import typing_extensions
from torch.types import py_sym_types
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from graphpasses._torch.fake_mode import is_fake, outside_tracing
from graphpasses._torch.group_ranks import named_group_ranks
from graphpasses._torch.pytree import tree_leaves
from graphpasses._torch.recorded_operator import Operator
from graphpasses._torch.schemas import bound_arguments, inner_names, out_of_place_view

# typing_extensions wraps what torch deprecates.
_OWN = str(Path(__file__).parents[1])
NOT_THE_USERS = (str(Path(torch.__file__).parent), _OWN, typing_extensions.__file__, "<")
"""How the paths of files begin that are not the user's own."""
FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of functional collectives."""
_GROUP_NAMES = ("group_name", "group")
_NUM_NUMBERS = 64

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format)
"""The classes of arguments that are compared as they are."""
LIFT_FRESH = torch.ops.aten.lift_fresh.default
# In eager they are calls of Python.
_STATES = ("graphpasses.read_random_state.default", "graphpasses.set_random_state.default")
_ONE_HOT = ["aten.zeros.default", "aten.scatter_.value"]
_ONE_HOT_TRACED = ["aten.arange.default", "aten.eq.Tensor", "aten._to_copy.default"]
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_WAITS = (
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops._c10d_functional._wrap_tensor_autograd.default,
)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is compared of a tensor."""

    # Where its memory comes from: a name, or the position of the call that made it and of its result.
    origin: str | tuple[int, int]
    offset: int | None  # in that memory, in elements
    dtype: torch.dtype
    device: str  # its kind of device
    shape: tuple[int | None, ...]  # its sizes; None where a size depends on data
    stride: tuple[int | None, ...]  # its strides; None where they depend on data

    def __str__(self) -> str:
        return kind_of(self)


def kind_of(tensor: torch.Tensor | TensorFacts) -> str:
    """Returns the dtype and shape of a tensor as text."""
    sizes = ", ".join("?" if size is None else str(size) for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def read_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the plain tensors that a tensor is made of: itself, or those inside of a subclass."""
    if is_traceable_wrapper_subclass_type(type(value)):
        for name in inner_names(value):
            inner = getattr(value, name)
            if isinstance(inner, torch.Tensor):
                yield from read_tensors(inner)
    else:
        yield value


def numbers_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns the first numbers of a tensor that Python made of numbers; None for a fake one."""
    if is_fake(tensor):
        return None
    with outside_tracing():
        return tuple(tensor.flatten()[:_NUM_NUMBERS].tolist())


def facts_of_value(value: Any) -> Any:
    """Returns what is compared of an argument that is no tensor and no list."""
    if isinstance(value, py_sym_types):
        return None
    if isinstance(value, torch.device):
        return value.type
    return value if isinstance(value, PLAIN) else type(value).__name__


def named_ranks(func: Any, name: str, value: Any) -> tuple[int, ...] | None:
    """Returns the ranks of the group that an argument of a functional collective names; None if it names none."""
    is_group = isinstance(value, str) and name in _GROUP_NAMES and getattr(func, "namespace", "") in FUNCTIONAL
    return named_group_ranks(value) if is_group else None


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Returns the tensors in a value."""
    return (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))


def memory_of(tensor: torch.Tensor) -> int:
    """Returns a number for the memory that a tensor reads, shared by its views."""
    if tensor.layout != torch.strided:
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)


def known_numbers(values: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns sizes or strides; None for each that depends on data."""
    return tuple([value if isinstance(value, int) else None for value in values])


@cache
def computes_nothing(func: Any) -> bool:
    """Whether an operator makes a view, waits, marks or asks."""
    if not isinstance(func, torch._ops.OpOverload) or func is LIFT_FRESH:
        return False
    returns = func._schema.returns
    is_view = bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    # As `.device`, or `.item()`; C++ asks fake tensors for their sizes, too.
    is_question = bool(returns) and not any("Tensor" in str(each.type) for each in returns)
    is_view |= out_of_place_view(func) is not None  # of its operand itself
    return is_view or is_question or func in _WAITS or func.namespace == "profiler" or str(func) in _STATES


def copies_nothing(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call writes out a tensor that is conjugated or negated lazily.

    Torch does so for operators that cannot read such a tensor; in eager also for ``x * 1j``, whose number has no such
    bit while it is traced.
    """
    return func is torch.ops.aten.clone.default and (args[0].is_conj() or args[0].is_neg())


def autograd_node() -> str:
    """Returns the name of the node of autograd that computes a gradient now; empty if none does."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def asking(traced: Any) -> str:
    """Returns what of torch runs now, while ``traced`` is traced: a node of autograd, or a function."""
    return autograd_node() or str(getattr(traced.torch_fn_metadata, "__name__", traced.torch_fn_metadata))


def accumulates() -> bool:
    """Whether autograd is about to give a leaf its gradient."""
    return autograd_node() == _ACCUMULATE


def one_hot(calls: Sequence[Operator]) -> tuple[Any, int] | None:
    """Returns what ``F.one_hot`` encodes, and by how many calls: it writes ones, or compares where it is traced."""
    names = [call.operator for call in calls[-3:]]
    if names == _ONE_HOT_TRACED:
        return calls[-2].inputs[0], 3
    if names[-2:] == _ONE_HOT and calls[-1].inputs[3] == 1:
        return calls[-1].inputs[2], 3 if names[0] == "aten.aminmax.default" else 2
    return None


def take_traced_numbers(calls: list[Operator]) -> tuple[None, ...]:
    """Takes out the last calls if they make a tensor of numbers, of which some are traced; returns one None for each
    of the first numbers.
    """
    of_stack = calls[-1].inputs[0] if calls and calls[-1].operator == "aten.stack.default" else ()
    made = calls[-1 - len(of_stack) : -1] if of_stack else calls[-1:]
    is_made = all(each.operator == "aten.full.default" and each.inputs[0] == () for each in made)
    if not is_made or all(each.inputs[1] is not None for each in made):
        return ()
    del calls[-len(made) - bool(of_stack) :]
    return (None,) * min(len(made), _NUM_NUMBERS)


def arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of a call, groups as their ranks: of two equal meshes DTensor may take either's group."""
    if getattr(func, "namespace", "") not in FUNCTIONAL:
        return (*args, *kwargs.values())
    given = bound_arguments(func, args, kwargs)
    return tuple(named_ranks(func, argument.name, value) or value for argument, value in given)


def with_sources(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any
) -> Iterator[tuple[Any, torch.Tensor | None]]:
    """Yields each result, with the argument whose memory it has according to the operator's schema."""
    if func in _WAITS:
        yield results, args[0]
        return
    schema = func._schema if isinstance(func, torch._ops.OpOverload) and func is not LIFT_FRESH else None
    several = schema is not None and len(schema.returns) > 1
    for index, value in enumerate(results if several else [results]):
        source = None
        for position, name in _sources(func)[index] if schema is not None and schema.returns else ():
            argument = args[position] if position < len(args) else kwargs.get(name)
            source = argument if source is None and isinstance(argument, torch.Tensor) else source
        yield from ((each, source) for each in tree_leaves(value))


@cache
def _sources(func: Any) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Returns, for each result of an operator, positions and names of the arguments whose memory it may have."""
    arguments = [(position, argument) for position, argument in enumerate(func._schema.arguments)]
    aliased = [(position, each.name, each.alias_info) for position, each in arguments if each.alias_info]
    sets = [each.alias_info.before_set if each.alias_info else set() for each in func._schema.returns]
    return tuple(tuple((p, name) for p, name, info in aliased if info.before_set & each) for each in sets)


@cache
def writes_first(func: Any) -> bool:
    """Whether an operator is the one that does in place, in its first argument, what another does out of place."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.name.endswith("_"):
        return False
    (first, *_), returns = func._schema.arguments, func._schema.returns
    return len(returns) == 1 and getattr(first.alias_info, "is_write", False)
