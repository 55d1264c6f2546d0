"""Several models whose modules one step runs: a teacher, a reference policy, a GAN's other network."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from graphpasses.errors import CaptureError
from graphpasses.state.optimizers import Optimizers


class SeveralModels(nn.Module):
    """A model, and others that its loss runs, as one: all their tensors are inputs of the step."""

    def __init__(self, model: nn.Module, others: Sequence[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.others = nn.ModuleList(others)


def with_others(model: nn.Module, others: Sequence[nn.Module]) -> nn.Module:
    """Returns a model and others as one, or the model alone where there are none."""
    if isinstance(others, nn.Module) or not all(isinstance(other, nn.Module) for other in others):
        raise CaptureError(
            f"others is {type(others).__name__}; give a tuple of the models that loss_fn runs beside the first, as "
            "others=(teacher,)"
        )
    return SeveralModels(model, others) if others else model


def first_model(model: nn.Module) -> nn.Module:
    """Returns the model that ``loss_fn`` is called with."""
    return model.model if isinstance(model, SeveralModels) else model


def clipped_parameters(model: nn.Module, optimizers: Optimizers) -> list[nn.Parameter]:
    """Returns whose gradients are clipped together: a model's parameters, and those of others that are updated."""
    if (first := first_model(model)) is model:
        return [*model.parameters()]
    clipped = {*first.parameters(), *(each for _, group in optimizers.groups for each in group["params"])}
    return [parameter for parameter in model.parameters() if parameter in clipped]
