"""Random numbers of a captured step: their generator's state is read and set as in eager, or the step is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx

from graphpasses._torch.schemas import draws, named_arguments
from graphpasses.analysis.backward import is_backward
from graphpasses.graph import CapturedStep
from graphpasses.graph.nodes import named_call
from graphpasses.ops.random_state import READ_RANDOM_STATE, SET_RANDOM_STATE, accelerator


@contextmanager
def random_state_traced(seeds: list[str]) -> Iterator[None]:
    """Puts calls that read and set random states, the CPU's or the accelerator's, into the graph traced in the block.

    Activation checkpointing saves the state in forward and sets it in backward, so that both draw the same numbers.
    ``seeds`` gets the calls that seed torch's generator. Source: ``torch.utils.checkpoint`` and
    ``torch.random.fork_rng``.
    """

    def seeding(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seeds.append(f"torch.{function.__name__}")
            return function(*args, **kwargs)

        return call

    replaced = {name: seeding(getattr(torch, name)) for name in ("manual_seed", "seed")}
    replaced |= {"get_rng_state": READ_RANDOM_STATE, "set_rng_state": SET_RANDOM_STATE}
    replace: Any = mock.patch.multiple
    with ExitStack() as stack:
        for module in (torch, torch.random):
            stack.enter_context(replace(module, **replaced))
        if (device := accelerator()) is not None:
            stack.enter_context(replace(torch.get_device_module(device), **_of_device(device)))
        yield


def _of_device(current: torch.device) -> dict[str, Callable[..., Any]]:
    """Returns what reads and sets the state of a device's generator; without an index it is the current device's."""

    def named(device: Any) -> torch.device:
        device = torch.device(current.type, device) if isinstance(device, int) else torch.device(device)
        here = torch.accelerator.current_device_index()
        return device if device.index is not None else torch.device(current.type, here)

    return {
        "get_rng_state": lambda device=current.type: READ_RANDOM_STATE(named(device)),
        "set_rng_state": lambda new_state, device=current.type: SET_RANDOM_STATE(new_state, named(device)),
    }


def find_random_fault(step: CapturedStep, seeds: Sequence[str]) -> str | None:
    """Returns why a step would draw other random numbers than eager, where ``loss_fn`` makes calls that seed torch's
    generator; without any, no state is read or set.
    """
    states = [node for node in step.graph.nodes if node.target in (READ_RANDOM_STATE, SET_RANDOM_STATE)]
    drawing = [node for node in step.graph.nodes if draws(node) and node not in states]
    if seeds and drawing:
        return (
            f"loss_fn calls {seeds[0]}, and {named_call(drawing[0])} draws from its generator; a captured step "
            "would not seed again. Seed before the step"
        )
    of_devices = {device.type for node in states if (device := named_arguments(node).get("device"))}
    elsewhere = [node for node in drawing if is_backward(node) and _device(node).type not in {"cpu", *of_devices}]
    if elsewhere and any(node.target is SET_RANDOM_STATE for node in states):
        return (
            f"activation checkpointing computes {named_call(elsewhere[0])} again in backward, with forward's random "
            f"numbers (preserve_rng_state=True), on {_device(elsewhere[0])}, which was not in use when the "
            "capture began: move the model there before it"
        )
    if not drawing:
        for node in reversed(states):
            step.graph.erase_node(node)
    return None


def _device(node: fx.Node) -> torch.device:
    value = node.meta["val"]
    first: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return first.device
