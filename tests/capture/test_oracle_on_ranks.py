"""A captured FSDP2 step against one eager step on two real ranks: all raise, also for what one alone computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.fsdp import fully_shard

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.parity.launch import run_ranks


class Layer(nn.Module):
    """Computes otherwise when it is traced, on some ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.ranks = nn.Linear(4, 4), ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        is_other = isinstance(y, FakeTensor) and dist.get_rank() in self.ranks
        y = y.sigmoid() if is_other else y.tanh()
        # Its strides are wrong in the first trace, so that ranks trace again.
        return torch.copysign(y.t(), torch.ones(4, 1)).t()


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def captured(*ranks: int) -> str:
    """Returns the error for a model that ``ranks`` trace otherwise, or how the step's bits compare with eager's."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(ranks), Layer(()))
    for module in (*model, model):
        fully_shard(module)
    x = torch.rand(3, 4) + dist.get_rank()
    try:
        step = capture_train_step(loss_fn, model, x)
    except FidelityError as error:
        return str(error)
    loss = step(x)
    return "equal" if torch.equal(loss, loss_fn(model, x)) else "differ"


def failing_on_one_rank() -> str:
    """Returns the error where the second rank alone cannot trace."""

    def fails(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("only here")
        return loss_fn(model, x)

    try:
        capture_train_step(fails, fully_shard(nn.Linear(4, 4)), torch.ones(3, 4))
    except (CaptureError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "captured"


def all_checks() -> list[str]:
    return [captured(), captured(0, 1), captured(1), failing_on_one_rank(), captured()]


@pytest.mark.multiprocess
def test_ranks_raise_together() -> None:
    first, second = run_ranks(all_checks, 2, timeout=120.0)
    assert first[0] == second[0] == first[4] == second[4] == "equal"
    begin = "eager and the captured step part at operator 2, in forward of module '0'"
    end = (
        "eager calls aten.tanh.default(float32[3, 4]), the graph aten.sigmoid.default(float32[3, 4]). Let the model "
        "compute the same whether it is traced or not"
    )
    for error in (first[1], second[1], second[2]):
        assert error.startswith(begin)
        assert error.endswith(end)
    assert first[2] == "on another rank, eager and the captured step part; its message says where"
    assert first[3] == "FailedElsewhereError: another rank could not capture the step; its message says why"
    assert second[3] == "ValueError: only here"
