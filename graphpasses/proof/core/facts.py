"""The fake values of a graph's nodes, as they must be, and where in memory they lie."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from graphpasses._torch.fake_mode import fake_call, fake_call_for_all_sizes, fake_mode_of, is_fake
from graphpasses._torch.schemas import returns_alias
from graphpasses.graph import WAIT
from graphpasses.graph.nodes import attribute, freeze
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.proof.core.evaluated import Layout
from graphpasses.proof.core.operators import is_free_of_offset
from graphpasses.proof.core.values import geometry

ALIGNMENT = 64
"""At a multiple of so many bytes begins what torch allocates, and no kernel asks for more."""

Leaf = tuple[fx.Node, int | None]
"""A tensor that a node has: its value, or one of several."""


class Place(NamedTuple):
    """Where a tensor lies.

    Args:
        root: the tensor that was first in this memory.
        view: how it lies there: shape, strides, offset, dtype, and whether it is read conjugated or negated. Sizes
            that depend on data are text.
    """

    root: Leaf
    view: Hashable


# In whose memory a tensor lies that a call returns: that of an input, by its number, and of one of its tensors; of an
# earlier tensor of the call; or None if the call made its memory.
_Origin = tuple[int, int | None] | int | None


class Facts:
    """The fake values of a graph's nodes, computed again where the graph is not as one that is known.

    A pass may leave a node whose ``meta["val"]`` is what it was before other strides came in. ``known`` is a graph
    whose fake values are true; None if this one's are. Who shares memory is read from the storages of fake values: a
    schema need not tell. ``geometries`` are shape, strides and offset of each value, or of each of several;
    ``places`` are where the tensors of a value lie; ``beside`` are, of one from outside, the others in its memory.
    """

    def __init__(
        self, graph: fx.Graph, known: Facts | None = None, live: Mapping[fx.Node, torch.Tensor] | None = None
    ) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.geometries: dict[fx.Node, Any] = {}
        self.places: dict[fx.Node, Any] = {}
        self.by_name: dict[str, fx.Node] = {}
        self._outside: dict[Hashable, list[Leaf]] = {}
        self.origins: dict[fx.Node, list[_Origin]] = {}
        self._memories: dict[int, list[StorageWeakRef]] = {}
        self._layouts: dict[tuple[fx.Node, bool], Any] = {}
        self.beside: dict[Leaf, list[Leaf]] = {}
        self._shared: dict[Hashable, Leaf] = {}
        self._live = live or {}
        self._stale: set[fx.Node] = set()  # whose strides follow from others than they did, and are not known
        for node in graph.nodes:
            self.by_name[node.name] = node
            if node.op == "output":
                continue
            original = known.by_name.get(node.name) if known is not None else None
            if known is None:
                self.values[node] = self.given(node)
            elif isinstance(original, fx.Node) and self._is_same(node, original, known):
                self.values[node] = self.given(node)
                self.origins[node] = known.origins.get(original, [])
            else:
                value = self.values[node] = self._computed(node)
                is_old = original is not None and value is original.meta.get("val")
                if _depends_on_data(value) and is_old:
                    self._stale.add(node)
            self.geometries[node] = geometries(self.values[node])
            self._place(node)
        for some in self._outside.values():
            for root in some if len(some) > 1 else ():
                others = self.beside.setdefault(root, [])
                others += [each for each in some if each != root and each not in others]

    def __getitem__(self, node: fx.Node) -> Any:
        return self.values[node]

    def given(self, node: fx.Node) -> Any:
        """Returns the fake value that a node says it has."""
        return node.meta.get("val")

    def layout_for(self, node: fx.Node, target: Any) -> Any:
        """Returns how a node's tensor, or each of several, lies in memory, as far as an operator may tell."""
        device = getattr(next(leaves(self.values[node]), (None,))[0], "device", None)
        return self.layout(
            node, with_offset=device is not None and not is_free_of_offset(target, device.type)
        )

    def layout(self, node: fx.Node, *, with_offset: bool = False) -> Any:
        """Returns how a node's tensor, or each of several, lies in memory; None for what is no tensor."""
        key = (node, with_offset)
        if key not in self._layouts:
            value, places = self.values[node], self.places[node]
            found = [
                self._layout(fake, place, with_offset)
                for (fake, _), place in zip(leaves(value), places, strict=True)
            ]
            self._layouts[key] = found if isinstance(value, (list, tuple)) else found[0]
        return self._layouts[key]

    def _layout(self, fake: Any, place: Place | None, with_offset: bool) -> Layout | None:
        if place is None:
            return None
        view: Any = place.view
        if not with_offset:
            return Layout(view[1], fake.device)
        of = place.root[0]
        # Of memory from outside it is not known where it begins.
        memory = str(of.target) if of.op in ("placeholder", "get_attr") else ""
        offset = view[2] * fake.dtype.itemsize % ALIGNMENT if type(view[2]) is int else view[2]
        return Layout(view[1], fake.device, (memory, offset))

    # ---- fake values ----------------------------------------------------------------------------------------------

    def _is_same(self, node: fx.Node, original: fx.Node, known: Facts) -> bool:
        if (
            node.op != original.op
            or node.target != original.target
            or node.meta.get("val") is not original.meta.get("val")
        ):
            return False
        if node.op != "call_function":
            return True
        mine, theirs = node.all_input_nodes, original.all_input_nodes
        if len(mine) != len(theirs) or freeze(_plain(node)) != freeze(_plain(original)):
            return False
        if self.sharing(mine) != known.sharing(
            theirs
        ):  # in whose memory the result lies, storages do not tell
            return False
        return all(
            self.views(a) == known.views(b) and _dtypes(self.values[a]) == _dtypes(known.values[b])
            for a, b in zip(mine, theirs, strict=True)
        )

    def views(self, node: fx.Node) -> list[Hashable]:
        """Returns how the tensors of a node lie in memory."""
        return [place and place.view for place in self.places[node]]

    def sharing(self, nodes: Sequence[fx.Node]) -> list[int]:
        """Returns which tensors of some nodes lie in one memory: of each the number of the first that lies there."""
        roots = [place and place.root for node in nodes for place in self.places[node]]
        first: dict[Leaf | None, int] = {}
        return [first.setdefault(root, index) for index, root in enumerate(roots)]

    def _computed(self, node: fx.Node) -> Any:
        """Returns what a call makes of its inputs; what the node says it has, where that depends on data."""
        if node.op != "call_function" or "unbacked_bindings" in node.meta:
            return node.meta.get("val")
        args: Any
        kwargs: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
            return args[0][args[1]]
        mode = fake_mode_of(args, kwargs)
        if mode is None:
            return node.meta.get("val")
        if not _depends_on_data(node.meta.get("val")):
            return fake_call(mode, node.target, args, kwargs)
        found = fake_call_for_all_sizes(mode, node.target, args, kwargs)
        return node.meta.get("val") if found is None else found

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _place(self, node: fx.Node) -> None:
        """Notes where the tensors of a node lie."""
        value = self.values[node]
        if node.op in ("placeholder", "get_attr"):
            self.places[node] = [self._place_outside(node, fake, index) for fake, index in leaves(value)]
            return
        origins = self.origins.get(node)
        if origins is None:
            origins = self.origins[node] = self._origins_of(node)
        inputs = node.all_input_nodes
        places: list[Place | None] = []
        for (fake, index), origin in zip(leaves(self.values[node]), origins, strict=True):
            if not _has_memory(fake):
                places.append(None)
                continue
            if origin is None:
                root: Leaf = (node, index)
            elif isinstance(origin, int):
                root = places[origin].root  # type: ignore[union-attr]
            else:
                root = self.places[inputs[origin[0]]][origin[1] or 0].root
            view: Any = _view(fake)
            if node in self._stale:
                strides = tuple(f"stride {dim} of {node.name}" for dim in range(len(view[0])))
                view = (view[0], strides, *view[2:])
            places.append(Place(root, view))
        self.places[node] = places

    def _place_outside(self, node: fx.Node, fake: Any, index: int | None) -> Place | None:
        if not _has_memory(fake):
            return None
        view = _view(fake)
        real = attribute(node) if node.op == "get_attr" else self._live.get(node)
        found: list[Any] = [StorageWeakRef(fake.untyped_storage())]  # type: ignore[no-untyped-call]
        if isinstance(real, torch.Tensor) and real.layout is torch.strided and not is_fake(real):
            found = [*(found if node.op == "placeholder" else []), StorageWeakRef(real.untyped_storage())]  # type: ignore[no-untyped-call]
        root = self._shared.setdefault((found[-1], view), (node, index))
        for each in found if root == (node, index) else ():
            self._outside.setdefault(each, []).append(root)
        return Place(root, view)

    def _origins_of(self, node: fx.Node) -> list[_Origin]:
        if node.target is operator.getitem:
            source, index = node.args
            of = self.values[source]  # type: ignore[index]
            if isinstance(of, (list, tuple)) and isinstance(index, int):
                return [(0, index % len(of))]
        if node.target == WAIT:  # it returns what it is given
            return [(0, None)]
        known: dict[StorageWeakRef, _Origin] = {}
        for number, source in enumerate(node.all_input_nodes):
            for each, (_, index) in zip(self._memory(source), leaves(self.values[source]), strict=True):
                known.setdefault(each, (number, index))
        if returns_alias(node.target) and not any(each in known for each in self._memory(node)):
            # It copied, or its fake value is another's: passes replace nodes.
            fresh = self._computed(node)
            if geometries(fresh) == self.geometries[node] and not _depends_on_data(fresh):
                self.values[node] = fresh
        origins: list[_Origin] = []
        for index, each in enumerate(self._memory(node)):
            origins.append(known.get(each))
            known.setdefault(each, index)
        return origins

    def _memory(self, node: fx.Node) -> list[StorageWeakRef]:
        """Returns the storage of each tensor of a node; of what is no tensor, one that no one has."""
        value = self.values[node]
        found = self._memories.get(id(value))
        if found is None:
            found = self._memories[id(value)] = [
                StorageWeakRef(each.untyped_storage()) if _has_memory(each) else object()  # type: ignore
                for each, _ in leaves(value)
            ]
        return found


def leaves(value: Any) -> Iterator[tuple[Any, int | None]]:
    """Yields what a value consists of, with its index if there are several."""
    if isinstance(value, (list, tuple)):
        yield from ((each, index) for index, each in enumerate(value))
    else:
        yield value, None


def _has_memory(fake: Any) -> bool:
    return isinstance(fake, torch.Tensor) and fake.layout is torch.strided


def _view(fake: torch.Tensor) -> Hashable:
    shape, strides, offset = tuple(fake.shape), tuple(fake.stride()), fake.storage_offset()
    if not all(type(each) is int for each in (*shape, *strides, offset)):
        shape, strides = (tuple(map(_size, each)) for each in (shape, strides))
        offset = _size(offset)
    return shape, strides, offset, fake.dtype, fake.is_conj(), fake.is_neg()


def _size(size: Any) -> Any:
    return size if type(size) is int else str(size_expression(size))


def _plain(node: fx.Node) -> Any:
    """Returns the arguments of a call with the number of each input in its place."""
    number = {each: index for index, each in enumerate(node.all_input_nodes)}
    return fx.node.map_arg((node.args, node.kwargs), lambda each: ("input", number[each]))


def geometries(value: Any) -> Any:
    """Returns shape, strides and offset of a fake value, or of each of several."""
    if isinstance(value, (list, tuple)):
        return tuple(map(geometries, value))
    return geometry(value)


def _depends_on_data(value: Any) -> bool:
    """Whether strides say nothing: to compute such values again may have the compiler guard on sizes."""
    if isinstance(value, (list, tuple)):
        return any(map(_depends_on_data, value))
    return value is not None and geometry(value) is None


def _dtypes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_dtypes, value))
    if not isinstance(value, torch.Tensor):
        return None
    return value.dtype, value.device, value.is_conj(), value.is_neg()
