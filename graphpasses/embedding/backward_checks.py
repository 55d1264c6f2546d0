"""Refuses a compiled backward that would do to tables what eager's would not, when it begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from graphpasses.analysis.effects import reached_outputs
from graphpasses.errors import UnsupportedError
from graphpasses.fbgemm.lookups import LookupCall
from graphpasses.graph import DynamoGraph

Gradients = Sequence[Tensor | None]


def check_gradient_arrives(name: str, outputs: Collection[int], effect: str) -> Callable[[Gradients], None]:
    """Returns a check that a table gets a gradient; for updates that change rows even if the gradient is zero.

    ``outputs`` are the positions of the model's outputs that depend on the table; ``effect`` says what the update
    does, e.g. ``"decays its rows"``.
    """

    def check(gradients: Gradients) -> None:
        if all(gradients[position] is None for position in outputs):
            raise UnsupportedError(
                f"the loss does not depend on what {name} looked up: eager leaves its tables as they are, the "
                f"compiled update, with a gradient of zero, {effect}; use those outputs in the loss, or return them "
                "detached"
            )

    return check


def check_lookups(graph: DynamoGraph) -> None:
    """Makes each backward check that gradients arrive at lookups whose updates do something without them."""
    reached = reached_outputs(graph.graph)
    for call in LookupCall.all(graph):
        effect, outputs = call.effect_without_gradient(), reached.get(call.node)
        if effect is not None and outputs:
            check = check_gradient_arrives(call.module, outputs, effect)
            graph.backward_checks += (lambda check=check: check,)  # type: ignore[misc]


def one_backward_per_forward(
    name: str, outputs: Collection[int], num_updates: list[int]
) -> Callable[[], Callable[[Gradients], None]]:
    """Returns what to call after a forward; it returns a check that no other backward has updated the tables since.

    Two forwards before one backward are two updates in a compiled model, and one in eager, which adds the gradients.
    ``num_updates`` holds one number, the updates until now, which all graphs that update the tables share.
    """

    def after_forward() -> Callable[[Gradients], None]:
        (num_before,) = num_updates

        def check(gradients: Gradients) -> None:
            if all(gradients[position] is None for position in outputs):
                return
            if num_updates != [num_before]:
                raise UnsupportedError(
                    f"{name}: another backward updated the tables since this forward; a lowered table is updated by "
                    "each backward, where eager adds the gradients of several forwards: run backward after each "
                    "forward, look up all batches in one call, or leave out 'lower-embedding-bags'"
                )
            num_updates[0] += 1

        return check

    return after_forward
