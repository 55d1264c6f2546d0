"""The state of the CPU's random number generator, read and set inside a graph: as checkpointing does in backward."""

from __future__ import annotations

import torch

from graphpasses.ops.define import define_operator

READ_RANDOM_STATE = define_operator(
    "read_random_state() -> Tensor",
    torch.get_rng_state,
    fake=lambda: torch.empty(torch.default_generator.get_state().numel(), dtype=torch.uint8, device="cpu"),
    draws=True,
)
"""``read_random_state() -> Tensor``: as ``torch.get_rng_state()``."""

SET_RANDOM_STATE = define_operator(
    "set_random_state(Tensor state) -> ()", torch.set_rng_state, fake=lambda state: None, draws=True
)
"""``set_random_state(Tensor state)``: as ``torch.set_rng_state(state)``."""
