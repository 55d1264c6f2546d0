"""The random state is read and set as torch does."""

from __future__ import annotations

import torch

from graphpasses.ops.random_state import READ_RANDOM_STATE, SET_RANDOM_STATE


def test_what_was_drawn_is_drawn_again() -> None:
    state = READ_RANDOM_STATE()
    assert torch.equal(state, torch.get_rng_state())
    drawn = torch.rand(4)
    assert not torch.equal(torch.rand(4), drawn)
    SET_RANDOM_STATE(state)
    assert torch.equal(torch.rand(4), drawn)


def test_calls_keep_their_order() -> None:
    for operator in (READ_RANDOM_STATE, SET_RANDOM_STATE):
        assert torch.Tag.nondeterministic_seeded in operator.tags
