"""The fake values of a graph's nodes, as they must be, and where in memory they lie."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from graphpasses._torch.fake_calls import fake_call, fake_call_for_all_sizes
from graphpasses._torch.fake_mode import fake_mode_of, is_fake
from graphpasses._torch.schemas import is_operator, returns_alias
from graphpasses._torch.symbols import have_symbols
from graphpasses.errors import ProofError
from graphpasses.graph import WAIT
from graphpasses.graph.nodes import attribute, freeze, named_call
from graphpasses.proof.core.operators import SAMPLE_BY_SAMPLE, is_free_of_offset
from graphpasses.proof.core.views import ALIGNMENT, Layout, View

_GIVEN = ("placeholder", "get_attr")  # what comes from outside
Leaf = tuple[fx.Node, int | None]  # a tensor that a node has: its value, or one of several


class Place(NamedTuple):
    """Where a tensor lies."""

    root: Leaf  # the tensor that was first in this memory
    view: View  # how it lies there


# In whose memory a tensor lies that a call returns: that of an input, by its number, or of the call, by -1, and of
# which of its tensors; None if the call made its memory.
_Origin = tuple[int, int | None] | None


class Facts:
    """The fake values of a graph's nodes, computed again where the graph is not as one that is known.

    A pass may leave a node whose ``meta["val"]`` is what it was before other strides came in. ``known`` is a graph
    whose fake values are true; None if this one's are. ``given`` are true ones of inputs. Who shares memory is read
    from the storages of fake values: a schema need not tell. ``places`` are where the tensors of a value lie;
    ``beside`` are, of one from outside, the others in its memory.
    """

    def __init__(self, graph: fx.Graph, known: Facts | None = None, given: dict[fx.Node, Any] | None = None) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.places: dict[fx.Node, list[Place | None]] = {}
        self.beside: defaultdict[Leaf, list[Leaf]] = defaultdict(list)
        self.by_name: dict[str, fx.Node] = {}
        self.origins: dict[fx.Node, list[_Origin]] = {}
        self._memories: dict[fx.Node, tuple[Any, list[StorageWeakRef]]] = {}
        self._outside: defaultdict[StorageWeakRef, list[Leaf]] = defaultdict(list)
        self._shared: dict[Hashable, Leaf] = {}
        self._stale: set[fx.Node] = set()  # whose strides follow from others than they did, and are not known
        self.guessed: set[fx.Node] = set()  # of whose shape it is known only what the node says
        inputs = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
        self._mode, self.varies = fake_mode_of(*inputs), have_symbols(inputs)
        for node in graph.nodes:
            if node.op == "output":
                continue
            self.by_name[node.name] = node
            original = known.by_name.get(node.name) if known is not None else None
            self.values[node] = (given or {}).get(node, node.meta.get("val"))
            if known is not None and original is not None and self._is_same(node, original, known):
                self.values[node], self.origins[node] = known.values[original], known.origins.get(original, [])
            elif known is not None:
                value = self.values[node] = self._computed(node)
                if original is not None and value is original.meta.get("val") and _depends_on_data(value):
                    self._stale.add(node)
            self.note_places(node)

    def __getitem__(self, node: fx.Node) -> Any:
        return self.values[node]

    def layout(self, node: fx.Node, target: Any = None) -> Any:
        """Returns how a node's tensor, or each of several, lies, as far as an operator may tell; None for others."""
        value = self.values[node]
        tensors = zip(leaves(value), self.places[node], strict=True)
        found = [self.layout_of(fake, place, target) for (fake, _), place in tensors]
        return found if isinstance(value, (list, tuple)) else found[0]

    def layout_of(self, fake: Any, place: Place | None, target: Any) -> Layout | None:
        """Returns how a tensor that lies in a place lies, as far as an operator may tell."""
        if place is None:
            return None
        of, view = place
        strides = (0, *view.strides[1:]) if view.shape[:1] == (1,) and target in SAMPLE_BY_SAMPLE else view.strides
        if target is None or is_free_of_offset(target, fake.device.type):
            return Layout(strides, fake.device)
        offset = view.offset * fake.dtype.itemsize % ALIGNMENT if type(view.offset) is int else view.offset
        return Layout(strides, fake.device, (self.outside(of), offset))

    def outside(self, root: Leaf) -> str:
        """Returns the name of memory from outside, of which it is not known where it begins; empty for other."""
        return str(root[0].target) if root[0].op in ("placeholder", "get_attr") else ""

    # ---- fake values ----------------------------------------------------------------------------------------------

    def _is_same(self, node: fx.Node, original: fx.Node, known: Facts) -> bool:
        """Whether a call is the one that is known, on inputs that lie alike, in each other's memory, too."""
        is_fresh = all(origin is None for origin in known.origins.get(original, ()))
        return (
            node.op == original.op
            and node.target == original.target
            and node.meta.get("val") is original.meta.get("val")
            and (node.op in _GIVEN or self.call_of(node, is_fresh) == known.call_of(original, is_fresh))
        )

    def call_of(self, node: fx.Node, is_fresh: bool) -> Hashable:
        """Returns what decides what a call makes; of what lies in its inputs' memory, in which, too."""
        memories: dict[Leaf, int] = {}
        inputs, numbers = dict[Hashable, int](), dict[fx.Node, Any]()  # those that lie alike have one number
        for number, each in enumerate(node.all_input_nodes):
            found: list[Hashable] = ["input", 0 if is_fresh else number]
            for (fake, _), place in zip(leaves(self.values[each]), self.places[each], strict=True):
                if place is None:
                    found.append(id(fake) if isinstance(fake, (torch.Tensor, list, tuple)) else freeze(fake))
                else:
                    memory = 0 if is_fresh else memories.setdefault(place.root, len(memories))
                    found.append((place.view, fake.device, memory))
            numbers[each] = fx.Node, inputs.setdefault(tuple(found), len(inputs))
        return freeze(fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)), *inputs

    def _computed(self, node: fx.Node) -> Any:
        """Returns what a call makes of its inputs; what the node says it has, where that depends on data."""
        given = self.values[node]
        if node.op in _GIVEN or (given is None and not is_operator(node.target)):  # which may set a mode
            return given
        if node.meta.get("unbacked_bindings") and _depends_on_data(given):
            return self._guessed(node)
        args, kwargs = cast(Any, fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__))
        try:
            if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
                return args[0][args[1]]
            mode = fake_mode_of(args, kwargs) or self._mode
            inputs = node.all_input_nodes if self.varies else []  # where a number may be one of many sizes
            varies = any(map(_depends_on_data, (given, *map(self.values.__getitem__, inputs))))
            found = mode and (fake_call_for_all_sizes if varies else fake_call)(mode, node.target, args, kwargs)
            return self._guessed(node) if found is None or not self.guessed.isdisjoint(inputs) else found
        except Exception as error:
            if not is_operator(node.target) and node.target is not operator.getitem:  # functions may need more
                return self._guessed(node)
            raise ProofError(f"{node.name} cannot be run: {named_call(node)}: {error}") from error

    def _guessed(self, node: fx.Node) -> Any:
        self.guessed.add(node)
        return node.meta.get("val")

    # ---- memory ---------------------------------------------------------------------------------------------------

    def note_places(self, node: fx.Node) -> None:
        """Notes where the tensors of a node lie."""
        if node.op in ("placeholder", "get_attr"):
            self.places[node] = [self._place_outside(node, *each) for each in leaves(self.values[node])]
            return
        if node not in self.origins:
            self.origins[node] = self._origins_of(node)
        places: list[Place | None] = []
        for (fake, index), origin in zip(leaves(self.values[node]), self.origins[node], strict=True):
            if (view := View.of(fake)) is None:
                places.append(None)
                continue
            root: Leaf = (node, index)
            if origin is not None:
                others = places if origin[0] < 0 else self.places[node.all_input_nodes[origin[0]]]
                root = others[origin[1] or 0].root  # type: ignore[union-attr]
            if node in self._stale:
                unknown = tuple(f"stride {dim} of {node.name}" for dim in range(len(view.shape)))
                view = view._replace(strides=unknown)
            places.append(Place(root, view))
        self.places[node] = places

    def _place_outside(self, node: fx.Node, fake: Any, index: int | None) -> Place | None:
        if (view := View.of(fake)) is None:
            return None
        real: Any = attribute(node) if node.op == "get_attr" else fake
        is_real = isinstance(real, torch.Tensor) and real.layout is torch.strided and not is_fake(real)
        if is_real and View.of(real) != view:
            raise ProofError(f"{node.name} does not lie as its fake value says")
        memory = StorageWeakRef((real if is_real else fake).untyped_storage())  # type: ignore[no-untyped-call]
        leaf = (node, index)
        root = self._shared.setdefault((memory, view), leaf)
        if root == leaf:
            for other in self._outside[memory]:
                self.beside[leaf].append(other)
                self.beside[other].append(leaf)
            self._outside[memory].append(leaf)
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
            one, two = ([View.of(fake) for fake, _ in leaves(each)] for each in (fresh, self.values[node]))
            if one == two and not _depends_on_data(fresh):
                self.values[node] = fresh
        origins: list[_Origin] = []
        for index, each in enumerate(self._memory(node)):
            origins.append(known.get(each))
            known.setdefault(each, (-1, index))
        return origins

    def _memory(self, node: fx.Node) -> list[StorageWeakRef]:
        """Returns the storage of each tensor of a node; of what is no tensor, one that no one has."""
        value = self.values[node]
        if node not in self._memories or self._memories[node][0] is not value:
            views = ((each, View.of(each)) for each, _ in leaves(value))
            found: list[Any] = [StorageWeakRef(of.untyped_storage()) if view else object() for of, view in views]  # type: ignore[no-untyped-call]
            self._memories[node] = value, found
        return self._memories[node][1]


def leaves(value: Any) -> list[tuple[Any, int | None]]:
    """Returns what a value consists of, with its index if there are several."""
    if isinstance(value, (list, tuple)):
        return [(each, index) for index, each in enumerate(value)]
    return [(value, None)]


def _depends_on_data(value: Any) -> bool:
    """Whether strides say nothing: to compute such values again may have the compiler guard on sizes."""
    return any(
        fake is not None and ((view := View.of(fake)) is None or not view.is_known) for fake, _ in leaves(value)
    )
