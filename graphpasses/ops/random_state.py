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
    is_used = hasattr(module, "get_rng_state") and getattr(module, "is_initialized", lambda: True)()
    return torch.device(kind.type, torch.accelerator.current_device_index()) if is_used else None


def read_state(device: torch.device | None = None) -> Tensor:
    """Returns the state of the CPU's generator, or of a device's."""
    if device is None or device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_state(state: Tensor, device: torch.device | None = None) -> None:
    """Sets the state of the CPU's generator, or of a device's."""
    if device is None or device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def read_states() -> dict[str, Tensor]:
    """Returns the states of the generators that a step may draw from, by the names of their devices."""
    device = accelerator()
    states = {} if device is None else {str(device): read_state(device)}
    return {"cpu": read_state(), **states}


def _fake(device: torch.device | None = None) -> Tensor:
    size = (torch.default_generator if device is None else torch.Generator(device)).get_state().numel()
    return torch.empty(size, dtype=torch.uint8, device="cpu")


READ_RANDOM_STATE = define_operator(
    "read_random_state(Device? device=None) -> Tensor", read_state, fake=_fake, draws=True
)
"""``read_random_state(Device? device=None) -> Tensor``: as ``get_rng_state`` of torch, or of a device's module."""

SET_RANDOM_STATE = define_operator(
    "set_random_state(Tensor state, Device? device=None) -> ()",
    set_state,
    fake=lambda state, device=None: None,
    draws=True,
)
"""``set_random_state(Tensor state, Device? device=None)``: as ``set_rng_state`` of torch, or of a device's module."""
