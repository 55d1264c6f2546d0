"""The random state is read and set as torch does."""

from __future__ import annotations

import pytest
import torch

from graphpasses.ops.random_state import READ_RANDOM_STATE, SET_RANDOM_STATE


def test_what_was_drawn_is_drawn_again() -> None:
    state = READ_RANDOM_STATE()
    assert torch.equal(state, torch.get_rng_state())
    drawn = torch.rand(4)
    assert not torch.equal(torch.rand(4), drawn)
    SET_RANDOM_STATE(state)
    assert torch.equal(torch.rand(4), drawn)


def test_another_thread_may_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace puts the operators in the place of torch's functions, in all threads."""
    state = torch.get_rng_state()
    monkeypatch.setattr(torch, "get_rng_state", READ_RANDOM_STATE)
    monkeypatch.setattr(torch, "set_rng_state", SET_RANDOM_STATE)
    torch.rand(1)
    torch.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state)


def test_calls_keep_their_order() -> None:
    for operator in (READ_RANDOM_STATE, SET_RANDOM_STATE):
        assert torch.Tag.nondeterministic_seeded in operator.tags
