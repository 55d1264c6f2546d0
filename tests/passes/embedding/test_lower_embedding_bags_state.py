"""Lowered tables and their optimizers stay the user's; errors name them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec")
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from graphpasses.errors import ArenaError, IdError
from graphpasses.passes import LowerEmbeddingBags
from graphpasses.passes.runner import Pipeline
from tests.helpers.lowered_bags import ADAGRAD, NUM_ROWS, ROUNDING, SGD, Bags, Pair, batch_of, state
from tests.helpers.models import same_bits

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


def test_state_dicts_go_both_ways() -> None:
    pair = Pair(Bags(mode="sum"), ADAGRAD)
    parameters = dict(pair.model.named_parameters())
    pair.step(batch_of(0))
    assert dict(pair.model.named_parameters()) == parameters  # the same objects
    pair.eager.load_state_dict(pair.model.state_dict())
    for theirs, ours in pair.tables():
        assert same_bits(theirs, ours)
        with torch.no_grad():
            theirs.normal_()
        state(theirs, "sum").fill_(3.0)
        state(theirs, "step").fill_(7.0)
        for mine, other in zip(ours._in_backward_optimizers, theirs._in_backward_optimizers, strict=True):
            mine.load_state_dict(copy.deepcopy(other.state_dict()))
    pair.model.load_state_dict(pair.eager.state_dict())
    for step in range(2):  # the first compiles again
        eager, lowered = pair.step(batch_of(0 if step else 1))
        torch.testing.assert_close(eager, lowered, **ROUNDING)
    for theirs, ours in pair.tables():
        torch.testing.assert_close(theirs, ours, **ROUNDING)
        torch.testing.assert_close(state(theirs, "sum"), state(ours, "sum"), **ROUNDING)
        assert state(ours, "step").item() == 9


def test_eager_steps_between_compiled_ones() -> None:
    pair = Pair(Bags(mode="sum"), ADAGRAD)
    for step in range(4):
        for model in (pair.eager, pair.compiled if step % 2 else pair.model):
            model(batch_of(step)).square().sum().backward()
    for theirs, ours in pair.tables():
        torch.testing.assert_close(theirs, ours, **ROUNDING)
        assert state(ours, "step").item() == 4


def test_each_instance_of_a_model_has_its_own_graph() -> None:
    """Dynamo would give the second one the first one's, and so its tables."""
    models = [Bags(mode="sum"), Bags(mode="sum")]
    with torch.no_grad():
        for table in models[1].parameters():
            table.neg_()
    references = copy.deepcopy(models)
    for model in (*models, *references):
        apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    options = {"pipeline": Pipeline((LowerEmbeddingBags(),)), "inner": "aot_eager"}
    compiled = [torch.compile(model, backend="graphpasses", options=options) for model in models]
    for call, model, reference in zip(compiled, models, references, strict=True):
        for each in (call, reference):
            each(batch_of(0)).square().sum().backward()
        for theirs, ours in zip(reference.parameters(), model.parameters(), strict=True):
            assert same_bits(theirs, ours)


def test_replaced_tables_are_compiled_again() -> None:
    """Replaced, they have no optimizer."""
    pair = Pair(Bags(1, mode="sum"), SGD)
    pair.step(batch_of(0, 1))
    pair.model.load_state_dict(copy.deepcopy(pair.eager.state_dict()), assign=True)
    assert same_bits(*pair.step(batch_of(0, 1)))
    assert pair.notes == ("bags.0.weight is looked up as before: no optimizer runs in its backward",)
    assert pair.model.bags[0].weight.grad is not None


def test_learning_rate_is_read_at_each_step() -> None:
    pair = Pair(Bags(mode="sum"), SGD)
    for step, rate in enumerate((0.1, torch.tensor(0.5), 0.0)):
        for tables in pair.tables():
            for table in tables:
                table._in_backward_optimizers[0].param_groups[0]["lr"] = rate
        assert same_bits(*pair.step(batch_of(step)))
    for theirs, ours in pair.tables():
        assert same_bits(theirs, ours)


def test_optimizers_that_no_longer_are_one_update() -> None:
    pair = Pair(Bags(mode="sum"), ADAGRAD)
    pair.step(batch_of(0))

    def change(option: str, value: float) -> None:
        for table in pair.tables()[1]:  # of both models
            table._in_backward_optimizers[0].param_groups[0][option] = value

    def assert_steps_agree(*steps: int) -> None:
        for step in steps:
            torch.testing.assert_close(*pair.step(batch_of(step)), **ROUNDING)
        for theirs, ours in pair.tables():
            torch.testing.assert_close(theirs, ours, **ROUNDING)
            torch.testing.assert_close(state(theirs, "sum"), state(ours, "sum"), **ROUNDING)
            assert same_bits(state(theirs, "step"), state(ours, "step"))

    change("lr", 0.5)
    assert_steps_agree(1, 2)
    assert len(pair.lookups()) == 2
    change("lr_decay", 0.9)
    assert_steps_agree(3)
    assert pair.notes == ("bags.1.weight is looked up as before: Adagrad with lr_decay=0.9 has no fused form",)
    change("lr_decay", 0)
    seen = []
    for table in pair.tables()[0]:
        table.register_post_accumulate_grad_hook(lambda table: seen.append(table.grad))
    assert_steps_agree(4)
    assert pair.notes == (
        "bags.0.weight is looked up as before: hooks watch its gradient, which a fused update does not make",
    )
    assert same_bits(*seen)


# ---- errors --------------------------------------------------------------------------------------------


def test_ids_that_are_no_rows() -> None:
    pair = Pair(Bags(mode="sum"), SGD)
    pair.step(batch_of(0))
    for wrong in (NUM_ROWS, -1):
        batch = batch_of(0)
        batch[1][0][0] = wrong
        with pytest.raises(IdError) as caught:
            pair.compiled(batch)
        assert str(caught.value) == f"bags.1.weight was looked up with id {wrong}; its 40 rows have ids 0 to 39"
        with pytest.raises((IndexError, RuntimeError)):
            pair.eager(batch)


@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_ids_that_are_no_integers(value: float) -> None:
    """Dynamo refuses them, as eager does, before they could be cut to integers."""
    pair = Pair(Bags(1, mode="sum"), SGD)
    pair.step(batch_of(0, 1))
    batch = [(torch.tensor([1.0, value, 3.0]), *rest) for _, *rest in batch_of(0, 1)]
    with pytest.raises(RuntimeError, match=r"expected indices to be long or int, got torch\.float32"):
        pair.compiled(batch)
    with pytest.raises(RuntimeError, match=r"Long, Int; but got torch\.FloatTensor"):
        pair.eager(batch)


def test_table_that_was_moved() -> None:
    pair = Pair(Bags(mode="sum"), SGD)
    pair.step(batch_of(0))
    table = pair.model.bags[0].weight
    table.data = table.data.clone()
    with pytest.raises(ArenaError, match=r"^bags\.0\.weight was moved or replaced after the model was compiled"):
        pair.compiled(batch_of(0))
