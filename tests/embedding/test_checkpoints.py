"""Keys of one tensor become one; what they hold must be equal, bit by bit."""

from __future__ import annotations

import pytest
import torch

from graphpasses.embedding.checkpoints import check_shapes, keys_message, merge_repeated_keys
from graphpasses.errors import CheckpointError


def test_names_inside_names() -> None:
    """``b`` is ``a``, and ``a.y`` is ``a.x``; what only begins like a name is another."""
    state = {"b.y.w": 1, "b.z": 2, "by.w": 3, "b": 4}
    merged = merge_repeated_keys(state, {"b": "a", "a.y": "a.x"}, group=None)
    assert dict(merged) == {"a.x.w": 1, "a.z": 2, "by.w": 3, "b": 4}


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(4)[::2], torch.ones(2), True),
    ],
)
def test_repeated(one: torch.Tensor, other: torch.Tensor, is_equal: bool) -> None:
    state = {"a.w": one, "b.w": other}
    if is_equal:
        assert merge_repeated_keys(state, {"b": "a"}, group=None)["a.w"] is one
        return
    with pytest.raises(CheckpointError) as error:
        merge_repeated_keys(state, {"b": "a"}, group=None)
    assert str(error.value) == (
        "'a.w' and 'b.w' are one tensor of the model, but in the state_dict they differ (rank 0). Delete the "
        "one that is not to be loaded"
    )


def test_keys() -> None:
    expected = {"a": torch.ones(1), "b": torch.ones(1)}
    assert keys_message(["a"], ["c"], expected) == (
        "the state_dict does not fit the model. It lacks 'a'. The model has no 'c'. Pass strict=False to "
        "load the rest"
    )


def test_shapes() -> None:
    check_shapes({"a": torch.ones(2), "b": torch.ones(3), "c": object()}, {"a": torch.zeros(2), "c": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"^'a' has shape \(2, 1\) in the state_dict and \(2,\) in the model$"):
        check_shapes({"a": torch.ones(2, 1)}, {"a": torch.ones(2)})
