"""How long the operators of a captured step take on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from graphpasses.capture.oracle import run_step
from graphpasses.capture.step_check import put_back
from graphpasses.errors import CaptureError
from graphpasses.graph import WAIT, CapturedStep, is_collective
from graphpasses.graph.operator_seconds import seconds_by_call
from graphpasses.graph.rank_consensus import RankConsensus


def measure_operators(
    step: CapturedStep, *batch: Any, num_rounds: int = 3, clock: Callable[[], float] = time.perf_counter
) -> CapturedStep:
    """Measures how long the operators of a captured step take, for passes that schedule by it.

    The step runs ``num_rounds`` times, operator by operator, without its update; then all is put back. All ranks call
    it together, and all get what the first of them measured, since they must decide alike.

    Args:
        step: as it was captured, before any pass.
        batch: as for a call of the step.
        num_rounds: how often it runs, at least once; of equal calls the median counts.
        clock: returns seconds; ``time.process_time`` does not count what else the machine does, but all threads.

    Returns:
        The step, which knows its operators' seconds.

    Raises:
        CaptureError: ``num_rounds`` is less than 1; or what a call of the step raises.

    Example:
        >>> model, x = torch.nn.Linear(4, 1), torch.ones(2, 4)
        >>> step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), model, x)
        >>> min(graphpasses.measure_operators(step, x).seconds.values()) > 0
        True
    """
    if num_rounds < 1:
        raise CaptureError(f"measure_operators: num_rounds must be at least 1, not {num_rounds}")
    device = next(nn.Module.parameters(step.model)).device
    timer = _Timer(step.module, device, clock)
    timed = replace(step, module=timer, update=None)  # type: ignore[arg-type]
    for _ in range(num_rounds):
        with put_back(step, batch):
            run_step(step.model, lambda: timed.run(*batch))
    seconds = seconds_by_call(timer.measured)
    return replace(step, seconds=RankConsensus.of_graph(step.graph, device).of_first(seconds))


class _Timer(fx.Interpreter):
    """Runs a graph module, and notes how long each of its operators takes."""

    def __init__(self, module: fx.GraphModule, device: torch.device, clock: Callable[[], float]) -> None:
        super().__init__(module)
        self.measured: list[tuple[fx.Node, float]] = []
        self._device, self._clock = device, clock

    __call__ = fx.Interpreter.run

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function" or node.target == WAIT or is_collective(node):
            return super().run_node(node)
        self._synchronize()
        start = self._clock()
        value = super().run_node(node)
        self._synchronize()
        self.measured.append((node, self._clock() - start))
        return value

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
