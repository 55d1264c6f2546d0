"""Batches of any nesting reach the model as the types that eager passes; another structure is refused by its path."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from graphpasses.capture import capture_train_step
from graphpasses.embedding.torchrec.batches import TORCHREC
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.graph.batch_structure import BatchStructure
from tests.helpers.models import same_bits

X = torch.arange(8.0).view(2, 4)
Y = X.flip(0) / 3


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 0.5
    num_made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.num_made += 1

    def total(self) -> torch.Tensor:
        return self.x + self.scale * self.y * self.num_made


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor

    def total(self) -> torch.Tensor:
        return self.x + 2 * self.y


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    def total(self) -> torch.Tensor:
        return self.x - self.y


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding is: items that are attributes, and private state of its tokenizer."""

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        super().__init__(items)
        self._encodings: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in ("data", "_encodings"):
            raise AttributeError(name)
        return self.data[name]

    def total(self) -> torch.Tensor:
        return self.x * self.y + self.x


class Items(dict):
    def total(self) -> torch.Tensor:
        return self["x"] * 2 - self["y"]


class Registered:
    """A container that says to pytree what its items are, and not how they are reached."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, sign: int) -> None:
        self.x, self.y, self.sign = x, y, sign

    def total(self) -> torch.Tensor:
        return self.x + self.sign * self.y


_pytree.register_pytree_node(
    Registered,
    lambda value: ([value.x, value.y], value.sign),
    lambda items, sign: Registered(*items, sign),
)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch.total()).square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def captured(batch: Any, loss_fn: Callable[..., torch.Tensor] = loss_fn) -> CapturedStep:
    return capture_train_step(loss_fn, build(), batch)


def assert_as_eager(step: CapturedStep, batch: Any, loss_fn: Callable[..., torch.Tensor] = loss_fn) -> None:
    eager = build()
    expected = loss_fn(eager, batch)
    expected.backward()
    step.model.zero_grad()
    assert same_bits(step(batch), expected.detach())
    assert same_bits(step.model.weight.grad, eager.weight.grad)


def refused(call: Callable[[], Any], kind: type[Exception] = BatchMismatchError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


MAKE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "dataclass": Pair,
    "frozen dataclass": Frozen,
    "named tuple": Named,
    "UserDict": lambda x, y: Encoding({"x": x, "y": y}),
    "dict": lambda x, y: Items(x=x, y=y),
    "registered": lambda x, y: Registered(x, y, -1),
}


@pytest.mark.parametrize("name", MAKE)
def test_containers_reach_the_model_as_they_are(name: str) -> None:
    make = MAKE[name]
    step = captured(make(X, X))
    assert_as_eager(step, make(X, Y))
    assert not same_bits(step(make(X, Y)), step(make(Y, X)))


def test_what_a_tokenizer_keeps_beside_its_encodings() -> None:
    batch = Encoding({"x": X, "y": Y})
    batch._encodings = [object()]
    assert_as_eager(captured(batch), batch)


class Masked(dict[str, Any]):
    _scale = 1.0


@dataclasses.dataclass
class Halved:
    x: torch.Tensor

    def __post_init__(self) -> None:
        self._scale = 0.5


class Labelled(Named):
    """A named tuple that has attributes, too."""


@pytest.mark.parametrize("make", [lambda x: Masked(x=x), Halved, lambda x: Labelled(x, Y)])
def test_private_attributes(make: Callable[[torch.Tensor], Any]) -> None:
    """Once, a step took what the class has for what the batch has."""

    def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch.x
        return model(x * batch._scale).sum()

    batches = [make(X), make(X)]
    for batch in batches:
        batch._scale = 3.0
    step = captured(batches[0], scaled)
    assert_as_eager(step, batches[1], scaled)
    batches[1]._scale = 2.0
    assert refused(lambda: dataclasses.replace(step, recapture=None)(batches[1])) == (
        "batch[0]._scale was 3.0 in the captured batch, and is 2.0; capture a step for this structure"
    )
    assert_as_eager(step, batches[1], scaled)


def test_a_private_attribute_that_changes_in_place() -> None:
    batch = Masked(x=X)
    batch._scales = [3.0]
    step = captured(batch, lambda model, batch: model(batch["x"] * batch._scales[0]).sum())
    step = dataclasses.replace(step, recapture=None)
    step(batch)
    batch._scales[0] = 2.0
    assert "batch[0]._scales was [3.0] in the captured batch, and is [2.0]" in refused(lambda: step(batch))


def test_one_tensor_given_twice_at_the_capture() -> None:
    """As labels often are the inputs; later they are not."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch["x"]) - batch["labels"].sum()).square().mean()

    step = captured({"x": X, "labels": X}, loss_fn)
    assert_as_eager(step, {"x": X, "labels": Y[:1].expand(2, 4).contiguous()}, loss_fn)


def attend(model: nn.Module, batch: Any) -> torch.Tensor:
    """Computes one product where all three are one tensor, as attention does, and three where they are not."""
    x, y = batch["x"], batch["y"]
    return model(x).square().mean() if y is x else (model(x) * model(y)).mean()


def test_whether_two_leaves_are_one_tensor_decides() -> None:
    for first in (X, Y):
        step = captured({"x": X, "y": first}, attend)
        for y, num_captures in ((first, 1), (X if first is Y else Y, 2), (first, 2)):
            assert_as_eager(step, {"x": X, "y": y}, attend)
            assert len(step.captures) == num_captures
    step = capture_train_step(attend, nn.Linear(4, 2), {"x": X, "y": Y}, recapture=False)
    with pytest.raises(CaptureError) as caught:
        step({"x": X, "y": X})
    assert str(caught.value) == (
        "batch[0]['x'] and batch[0]['y'] are one tensor, and were two when the step was captured. Capture it with "
        "recapture=True, or capture a step for each of these cases"
    )


def nested(x: torch.Tensor) -> dict[str, Any]:
    return {"a": [{"x": x, "y": 2.0}], "b": collections.OrderedDict(x=x * 2)}


def test_keys_in_another_order() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return (model(batch["a"][0]["x"]) * batch["a"][0]["y"] + batch["b"]["x"].sum()).square().mean()

    step = captured(nested(X), loss_fn)
    batch = nested(Y)
    turned = {"b": batch["b"], "a": [{"y": 2.0, "x": Y}]}
    assert [*turned] != [*batch]
    assert_as_eager(step, turned, loss_fn)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": nested(X)["a"]}, "batch[0] lacks ['b']"),
        (
            {"a": [{"x": X, "z": 2.0}], "b": nested(X)["b"]},
            "batch[0]['a'][0] lacks ['y'] and has ['z'] beside what the captured batch had",
        ),
        ({**nested(X), "a": []}, "batch[0]['a'] lacks [0]"),
        ({**nested(X), "a": ({},)}, "batch[0]['a'] is a tuple, and was a list in the captured batch"),
        (
            {**nested(X), "b": {"x": X}},
            "batch[0]['b'] is a dict, and was a OrderedDict in the captured batch",
        ),
        (X, "batch[0] is a Tensor, and was a dict in the captured batch"),
    ],
)
def test_another_structure(batch: Any, message: str) -> None:
    step = captured(nested(X), lambda model, batch: model(batch["b"]["x"]).sum())
    step = dataclasses.replace(step, recapture=None)
    assert refused(lambda: step(batch)) == f"{message}; capture a step for this structure"


def test_what_loss_fn_takes_out_of_the_batch() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        target = batch["a"][0].pop("x")
        return (model(batch["b"].pop("x")) - target.sum()).square().mean()

    batch = nested(X)
    step = captured(batch, loss_fn)
    assert batch["b"].keys() == {"x"}
    assert not same_bits(step(nested(Y)), step(batch))
    assert batch == {"a": [{"y": 2.0}], "b": {}}
    step.check(nested(Y))
    assert refused(lambda: step(batch)).startswith("batch[0]['a'][0] lacks ['x']")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda batch: batch.update(z=X), "batch[0]['z']"),
        (lambda batch: batch.update(b=dict(batch["b"])), "batch[0]['b']"),
        (lambda batch: batch["a"].pop(), "batch[0]['a'][0]"),
        (lambda batch: batch["b"].__setitem__("x", batch["b"]["x"] * 1), "batch[0]['b']['x']"),
    ],
)
def test_what_loss_fn_puts_into_the_batch(change: Callable[[Any], Any], where: str) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        x = batch["b"]["x"]
        change(batch)
        return model(x).sum()

    with pytest.raises(CaptureError, match=re.escape(f"loss_fn changes {where} in the batch")):
        captured(nested(X), loss_fn)


def test_another_number_of_arguments() -> None:
    step = dataclasses.replace(captured(Pair(X, Y)), recapture=None)
    assert refused(step) == "batch lacks [0]; capture a step for this structure"
    assert refused(lambda: step(Pair(X, Y), 1)) == (
        "batch has [1] beside what the captured batch had; capture a step for this structure"
    )


def test_leaves_of_containers_are_named() -> None:
    step = dataclasses.replace(captured(Pair(X, Y)), recapture=None)
    assert refused(lambda: step(Pair(X, Y, scale=0.25))) == (
        "batch[0].scale differs from the captured batch: expected 0.5, got 0.25. Capture a step for it, or give a "
        "number that varies in a tensor"
    )
    assert refused(lambda: step(Pair(X, nested(X)))) == (
        "batch[0].y differs from the captured batch: expected shape [2, 4], torch.float32, on cpu, got a dict. "
        "Capture a step for it"
    )


def test_what_a_registered_container_knows() -> None:
    step = dataclasses.replace(captured(Registered(X, Y, 1)), recapture=None)
    assert refused(lambda: step(Registered(X, Y, 2))) == (
        "batch[0] was TreeSpec(Registered, 1, [*,\n  *]) in the captured batch, and is TreeSpec(Registered, 2, [*,\n"
        "  *]); capture a step for this structure"
    )


@pytest.mark.parametrize("make", [lambda: Pair(X, Y), lambda: Items(x=X, y=Y), lambda: Labelled(X, Y)])
def test_attributes_beside_the_items(make: Callable[[], Any]) -> None:
    batch = make()
    batch.factor = 3
    message = (
        f"batch[0], a {type(batch).__name__}, has the attribute 'factor' beside its items, which a captured step "
        "would not see; make it an item, or pass a plain dict"
    )
    assert refused(lambda: captured(batch)) == message
    step = captured(make())
    assert refused(lambda: step(batch)) == message


class OnlyKeywords(Items):
    def __init__(self, *, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__(x=x, y=y)


class Doubled(Mapping[str, Any]):
    """A mapping that is no dict, and makes other items of those that it is given."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_given = None
        self._items = {key: item * 2 for key, item in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@pytest.mark.parametrize("make", [lambda: OnlyKeywords(x=X, y=Y), lambda: Doubled({"x": X})])
def test_mappings_that_are_not_made_of_their_items(make: Callable[[], Any]) -> None:
    name = type(make()).__name__
    assert refused(lambda: captured(make()), CaptureError) == (
        f"batch[0] is a {name}, which {name}(dict of its items) does not make again; pass a plain dict"
    )


def test_other_objects() -> None:
    assert refused(lambda: captured({"x": [X, object()]}), CaptureError) == (
        "batch[0]['x'][1] is a object; a batch holds tensors, numbers, strings and None, in lists, tuples, dicts and "
        "dataclasses. Give loss_fn other objects through its closure, and None in place of what it does not read"
    )


def test_torchrecs_jagged_tensors() -> None:
    torchrec = pytest.importorskip("torchrec")
    lengths = torch.tensor([1, 2])
    features = torchrec.KeyedJaggedTensor(["a"], torch.arange(3), lengths=lengths)
    structure = BatchStructure.of(([features, 2],), TORCHREC)
    assert structure.paths == ("batch[0][0]._values", "batch[0][0]._lengths", "batch[0][1]")
    features.offsets()  # which it keeps
    leaves = structure.leaves(([features, 3],))
    assert [leaves[0].tolist(), leaves[1].tolist(), leaves[2]] == [[0, 1, 2], [1, 2], 3]
    ((made, number),) = structure.build(leaves)
    assert (type(made), made.keys(), number) == (torchrec.KeyedJaggedTensor, ["a"], 3)
    assert made.lengths() is lengths
    weighted = torchrec.KeyedJaggedTensor(["a"], torch.arange(3), torch.ones(3), lengths)
    assert refused(lambda: structure.leaves(([weighted, 3],))) == (
        "batch[0][0] has ._weights beside what the captured batch had; capture a step for this structure"
    )


def test_other_types_of_torchrec() -> None:
    class Other:
        """As TorchRec may have some day."""

    Other.__module__ = "torchrec.sparse.other"
    assert refused(lambda: captured([Other()]), CaptureError) == (
        "batch[0][0] is TorchRec's Other; a captured step takes KeyedJaggedTensor, JaggedTensor, KeyedTensor. Give "
        "those that it holds, or use torch.compile(model, backend='graphpasses')"
    )
