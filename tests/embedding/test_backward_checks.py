"""Backwards that would update tables otherwise than eager: refused, by name, before anything is updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchrec")

from tests.helpers.recommenders import CPU, DIM, bags, ids  # loads TorchRec without its warnings  # isort: skip

from torchrec import KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

import graphpasses
from graphpasses.errors import UnsupportedError
from tests.helpers.lowered_bags import ADAGRAD, SGD, Bags, Pair, batch_of, ids_of, state

LEFT = "the loss does not depend on what {} looked up: eager leaves its tables as they are, the compiled update, "
LEFT += "with a gradient of zero, {}; use those outputs in the loss, or return them detached"


class Towers(Bags):
    """Returns what each table looked up, the second detached if asked."""

    def __init__(self, is_detached: bool = False) -> None:
        super().__init__(2, mode="sum")
        self.is_detached = is_detached

    def forward(self, batch: list[Any]) -> tuple[Tensor, Tensor]:
        left, right = (bag(*args) for bag, args in zip(self.bags, batch, strict=True))
        return left, right.detach() if self.is_detached else right


def train_left(pair: Pair) -> None:
    for model in (pair.eager, pair.compiled):
        left, _ = model(batch_of(0, 2))
        left.square().sum().backward()


@pytest.mark.parametrize(("optimizer", "is_detached"), [(SGD, False), (ADAGRAD, True)])
def test_a_table_without_a_gradient_stays_as_it_is(optimizer: Any, is_detached: bool) -> None:
    pair = Pair(Towers(is_detached), optimizer)
    train_left(pair)
    for eager, compiled in pair.tables():
        torch.testing.assert_close(eager, compiled)
        if optimizer is ADAGRAD:
            assert state(eager, "step") == state(compiled, "step")
    steps = [float(state(eager, "step")) for eager, _ in pair.tables()] if optimizer is ADAGRAD else [1, 0]
    assert steps == [1, 0]


def test_a_lowered_table_that_counts_steps_needs_a_gradient() -> None:
    with pytest.raises(UnsupportedError) as error:
        train_left(Pair(Towers(), ADAGRAD))
    assert str(error.value) == LEFT.format("bags.1.weight", "counts a step")


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_two_forwards_before_a_backward_of_lowered_tables(inner: Any) -> None:
    pair = Pair(Bags(2), SGD, inner=inner)
    before = [table.detach().clone() for table in pair.model.parameters()]
    losses = [pair.compiled(batch_of(step, 2)).square().sum() for step in range(2)]
    losses[1].backward()
    assert not torch.equal(before[0], pair.model.bags[0].weight)
    with pytest.raises(UnsupportedError) as error:
        losses[0].backward()
    assert str(error.value) == (
        "bags.0.weight to bags.1.weight: another backward updated the tables since this forward; a lowered table is "
        "updated by each backward, where eager adds the gradients of several forwards: run backward after each "
        "forward, look up all batches in one call, or leave out 'lower-embedding-bags'"
    )
    pair.compiled(batch_of(2, 2)).square().sum().backward()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_gradient_that_is_asked_for_updates_no_table(inner: Any) -> None:
    pair = Pair(Bags(1, mode="sum"), SGD, inner=inner)
    weights = torch.ones(7, requires_grad=True)
    batch = [(ids_of(0), torch.tensor([0, 2]), weights)]
    before = pair.model.bags[0].weight.detach().clone()
    for ask in (lambda loss: torch.autograd.grad(loss, weights), lambda loss: loss.backward(inputs=[weights])):
        ask(pair.eager(batch).sum())
        with pytest.raises(UnsupportedError, match=r"^autograd\.grad\(\.\.\.\), or backward"):
            ask(pair.compiled(batch).sum())
        with torch.compiler.set_stance("force_eager"):
            ask(pair.compiled(batch).sum())
    assert all(torch.equal(before, table) for table in pair.tables()[0])
    pair.compiled(batch).sum().backward()
    assert not torch.equal(before, pair.model.bags[0].weight)


class TwoCollections(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (
            FusedEmbeddingBagCollection(
                bags(1).embedding_bag_configs(), torch.optim.Adagrad, {"lr": 0.1} | options, device=CPU
            )
            for _ in range(2)
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        return self.left(features).values(), self.right(features).values()


def tables_of(model: nn.Module) -> list[Tensor]:
    return [table for module in model.modules() for table in module._buffers.values() if table is not None]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("eps", "is_refused"), [(1e-8, False), (0, True)])
def test_an_update_by_zero_divides_by_eps(eps: float, is_refused: bool) -> None:
    torch.compiler.reset()
    eager, model = TwoCollections({"eps": eps}), TwoCollections({"eps": eps})
    compiled = graphpasses.compile(model, inner="aot_eager", fullgraph=True)

    def train(call: Callable[..., Any]) -> None:
        left, right = call(ids(0, 0, 1))
        assert left.shape == right.shape == (5, DIM)
        left.square().sum().backward()

    train(eager)
    if not is_refused:
        train(compiled)
        assert all(torch.equal(*pair) for pair in zip(tables_of(eager), tables_of(model), strict=True))
        return
    with pytest.raises(UnsupportedError) as error:
        train(compiled)
    module = "right._emb_modules[0]._emb_module"
    assert str(error.value) == LEFT.format(module, "divides zero by eps=0")
    assert not any(table.isnan().any() for table in tables_of(model))
