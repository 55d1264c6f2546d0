"""Attributes of modules that a step reads while it is traced: its graph has their values built in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from graphpasses._torch.module_reads import MISSING, attributes_watched
from graphpasses.errors import CaptureError
from graphpasses.graph.module_facts import AttributesRead
from graphpasses.graph.plain_values import ABSENT, describe_key, is_identity, is_iterator, value_key
from graphpasses.identity import same_bits, walk_modules

if TYPE_CHECKING:
    from torchtitan.experiments.graph_trainer.make_fx_tracer import TracedResult

__all__ = ["AttributeWatch", "trace_and_watch"]

_Slot = tuple[nn.Module, str]


def trace_and_watch(
    model: nn.Module, trace: Callable[[], TracedResult]
) -> tuple[TracedResult, dict[nn.Module, AttributesRead]]:
    """Traces a step and says which attributes of the model's modules it read.

    What forward changes for good at its first call, as a flag or a size that it notes, it is traced with again: the
    graph must be the same.

    Args:
        model: the model.
        trace: traces the step; may be called twice.

    Raises:
        CaptureError: forward reads an iterator, or changes an attribute that it reads at each call, or computes
            otherwise after a change.
    """
    watch = AttributeWatch(model)
    with watch.active():
        traced = trace()
        changed = watch.changed()
        again = trace() if changed else traced
        changed_again = watch.changed()
    for slot, after in changed.items():
        texts = [describe_key(key) for key in (watch.first[slot], after, changed_again[slot])]
        if after != changed_again[slot]:
            raise CaptureError(
                f"forward reads attribute {watch.path(slot)!r} and changes it at each call ({', '.join(texts)}), and "
                "a captured step would not. Keep it in a buffer that forward writes in place, or set it outside"
            )
        if not _same_graphs(traced.gm, again.gm):
            raise CaptureError(
                f"forward changes attribute {watch.path(slot)!r} ({', '.join(texts[:2])}) and computes otherwise "
                "from then on; a captured step would not. Run forward once before the capture"
            )
    return traced, watch.read(changed)


def _same_graphs(graph: fx.GraphModule, other: fx.GraphModule) -> bool:
    graphs, others = ([m for m in each.modules() if isinstance(m, fx.GraphModule)] for each in (graph, other))
    return [each.code for each in graphs] == [each.code for each in others] and all(
        same_bits(getattr(graph, node.target), getattr(other, node.target))
        for node in graph.graph.find_nodes(op="get_attr")
        if isinstance(getattr(graph, node.target), torch.Tensor)
    )


class AttributeWatch:
    """The attributes that were read before they were set, by module and name, and their keys then.

    Args:
        model: whose modules are watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths = {module: path for path, module in reversed([*walk_modules(model)])}
        self._own = {module: frozenset(vars(module)) for module in self.paths}
        self.first: dict[_Slot, Hashable] = {}
        self._ignored: set[_Slot] = set()
        self._keys: dict[int, tuple[Any, Hashable]] = {}  # of objects, such as a config that all modules read

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watches what the block reads and sets."""
        with attributes_watched(self._on_read, self._on_write):
            yield

    def path(self, slot: _Slot) -> str:
        """Returns the path of an attribute.

        Args:
            slot: its module and its name.
        """
        return f"{self.paths[slot[0]]}.{slot[1]}".lstrip(".")

    def _on_read(self, module: nn.Module, name: str, value: Any) -> None:
        slot = (module, name)
        if slot in self.first or slot in self._ignored or module not in self.paths:
            return
        if is_iterator(value):
            raise CaptureError(
                f"forward reads attribute {self.path(slot)!r}, an iterator, which each step takes forward; a "
                "captured step would not. Give what it yields in the batch"
            )
        if id(value) not in self._keys:
            self._keys[id(value)] = (value, value_key(value))
        key = self._keys[id(value)][1]
        if (
            key is None
            or self._is_computed(*slot)
            or name in (*module._parameters, *module._buffers, *module._modules)
        ):
            self._ignored.add(slot)
        else:
            self.first[slot] = key

    def _on_write(self, module: nn.Module, name: str) -> None:
        if (module, name) not in self.first:
            self._ignored.add((module, name))

    def _is_computed(self, module: nn.Module, name: str) -> bool:
        """Whether an attribute is a method or a property, and not the module's own."""
        return name not in self._own[module] and hasattr(
            inspect.getattr_static(type(module), name, None), "__get__"
        )

    def changed(self) -> dict[_Slot, Hashable]:
        """Returns the keys of the attributes that are not what they were when they were first read."""
        now = {slot: value_key(getattr(*slot, MISSING)) for slot in self.first}
        return {slot: key for slot, key in now.items() if key != self.first[slot] and not is_identity(key)}

    def read(self, changed: dict[_Slot, Hashable]) -> dict[nn.Module, AttributesRead]:
        """Returns what was read, by module.

        Args:
            changed: as :meth:`changed` returned it.
        """
        names: dict[nn.Module, list[str]] = {}
        for module, name in self.first:
            names.setdefault(module, []).append(name)
        return {
            module: AttributesRead(
                tuple(name for name in each if self.first[module, name] != ABSENT),
                frozenset(name for name in each if self.first[module, name] == ABSENT),
                {
                    name: (self.first[module, name], changed[module, name])
                    for name in each
                    if (module, name) in changed
                },
            )
            for module, each in names.items()
        }
