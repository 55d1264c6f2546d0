"""Where a captured step first differs from eager: both run once, from one state, and record their operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from graphpasses._torch.group_ranks import gathered, rank_of_world
from graphpasses._torch.recorded_operator import Operator
from graphpasses.capture.accumulation_hooks import hooks_set_aside
from graphpasses.capture.step_check import put_back, run_eagerly
from graphpasses.graph import CapturedStep
from graphpasses.graph.returned import loss_of
from graphpasses.parity.first_difference import differing, first_difference, first_of_ranks
from graphpasses.parity.location import Location
from graphpasses.parity.operators import OperatorStep
from graphpasses.parity.record_operators import operators_recorded, values_of
from graphpasses.state.left_tensors import live_state_restored


def locate_step(step: CapturedStep, loss_fn: Callable[..., Tensor], *batch: Any) -> Location:
    """Finds the operator at which a captured step, rewritten or not, first differs from its eager reference.

    Both run once on the live model, which is left as it was: parameters, buffers, gradients and random states. Where
    the step updates, eager does so by the optimizer's own step.
    All ranks of the model call it together.

    Args:
        step: the step.
        loss_fn: what was captured.
        batch: as the step takes it.

    Returns:
        The first difference of all ranks, the same on each; none if loss, gradients, weights and buffers are equal.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        >>> loss_fn = lambda model, x: model(x).sum()
        >>> step = graphpasses.capture_train_step(loss_fn, model, torch.ones(2, 4))
        >>> locate_step(step, loss_fn, torch.ones(2, 4)).difference is None
        True
        >>> (node,) = step.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
        >>> node.kwargs = {"approximate": "tanh"}
        >>> _ = step.module.recompile()
        >>> locate_step(step, loss_fn, torch.ones(2, 4)).difference.b.node
        'gelu'
    """

    norm = step.grad_norm
    fresh = step.batch_structure.fresh
    runs = (lambda: run_eagerly(loss_fn, step, fresh(batch)), lambda: step.run(*fresh(batch)))
    a, b = (_recorded(step, batch, run) for run in runs)
    step.grad_norm = norm
    found = first_difference(a, b)
    both = gathered((found, bool(differing(a.end, b.end))))
    if not any(differs for _, differs in both):
        return Location(None)
    differences = [each for each, _ in both if each is not None]
    return Location(first_of_ranks(differences), differences)


def _recorded(step: CapturedStep, batch: tuple[Any, ...], run: Callable[[], Any]) -> OperatorStep:
    operators: list[Operator] = []
    model = step.model
    with put_back(step, batch), live_state_restored(model), hooks_set_aside(model):
        for parameter in model.parameters():
            parameter.grad = None
        start = values_of(model, step.batch_structure.leaves(batch), gradients=False)
        with operators_recorded(model, operators.append):
            loss = loss_of(run()).detach()
        end = values_of(model, gradients=True, loss=loss)
    return OperatorStep(rank_of_world()[0], 0, start, operators, end)
