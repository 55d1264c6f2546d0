"""RNNs whose weights are computed, which torch keeps in a list, too: the step has eager's bits, and eager goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from graphpasses.capture import capture_train_step
from graphpasses.identity import same_bits

NAME = "weight_hh_l0"


class Dropped(nn.Module):
    """Drops weights of a recurrent layer, as AWD-LSTM does."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn
        self.raw = nn.Parameter(rnn._parameters.pop(NAME).detach())  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        setattr(self.rnn, NAME, nn.functional.dropout(self.raw, 0.5, self.training))
        result: tuple[torch.Tensor, torch.Tensor] = self.rnn(x)
        return result


def pruned(rnn: nn.RNNBase) -> nn.Module:
    module: nn.Module = prune.l1_unstructured(rnn, NAME, 0.3)
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.RNN(4, 4, num_layers=2),
    "weight dropped": lambda: Dropped(nn.LSTM(4, 4)),
    "weight norm": lambda: weight_norm(nn.GRU(4, 4), NAME),
    "parametrized": lambda: parametrizations.weight_norm(nn.LSTM(4, 4), NAME),
    "pruned": lambda: pruned(nn.GRU(4, 4)),
}


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)[0].square().mean()
    return loss


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_bits_of_eager(name: str) -> None:
    torch.manual_seed(0)
    ours, x = MODELS[name](), torch.randn(3, 5, 2, 4)
    state = copy.deepcopy(ours.state_dict())
    eager = MODELS[name]()
    eager.load_state_dict(state)
    step, losses = capture_train_step(loss_fn, ours, x[0]), []
    updates = [torch.optim.SGD(each.parameters(), 0.5) for each in (ours, eager)]
    for index, batch in enumerate(x):
        torch.manual_seed(index)
        expected = loss_fn(eager, batch)
        expected.backward()
        torch.manual_seed(index)
        losses.append(step(batch))
        assert same_bits(losses[-1], expected.detach())
        for update in updates:
            update.step()
            update.zero_grad()
        assert all(map(same_bits, ours.parameters(), eager.parameters()))
    assert not same_bits(losses[0], losses[1])
    after = []
    for model in (ours, eager):
        torch.manual_seed(9)
        after.append(loss_fn(model, x[0]).detach())
    assert same_bits(*after)
