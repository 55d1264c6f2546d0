"""States of random number generators, read and set inside a graph: as checkpointing does in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from graphpasses.ops.define import define_operator


def accelerator() -> torch.device | None:
    """Returns the device whose generator a step draws from beside the CPU's: the accelerator, if it is in use."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(kind)
    is_used = hasattr(module, "default_generators") and getattr(module, "is_initialized", lambda: True)()
    return torch.device(kind.type, torch.accelerator.current_device_index()) if is_used else None


def _generator(device: torch.device | None) -> torch.Generator:
    """Returns what ``get_rng_state`` and ``set_rng_state`` ask, which a thread that traces replaces for all."""
    if device is None or device.type == "cpu":
        return torch.default_generator
    generator: torch.Generator = torch.get_device_module(device).default_generators[device.index]
    return generator


def _set_state(state: Tensor, device: torch.device | None = None) -> None:
    _generator(device).set_state(state)


def read_states() -> dict[str, Tensor]:
    """Returns the states of the generators that a step may draw from, by the names of their devices."""
    device = accelerator()
    others = {} if device is None else {str(device): _generator(device).get_state()}
    return {"cpu": torch.default_generator.get_state(), **others}


READ_RANDOM_STATE = define_operator(
    "read_random_state(Device? device=None) -> Tensor",
    lambda device=None: _generator(device).get_state(),
    fake=lambda device=None: torch.empty(_generator(device).get_state().numel(), dtype=torch.uint8, device="cpu"),
    draws=True,
)
"""``read_random_state(Device? device=None) -> Tensor``: as ``get_rng_state`` of torch, or of a device's module."""

SET_RANDOM_STATE = define_operator(
    "set_random_state(Tensor state, Device? device=None) -> ()",
    _set_state,
    fake=lambda state, device=None: None,
    draws=True,
)
"""``set_random_state(Tensor state, Device? device=None)``: as ``set_rng_state`` of torch, or of a device's module."""
