"""A loss that communicates, as people write it: traced as what a graph knows, with eager's bits; else refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import all_gather_into_tensor, all_reduce, broadcast_object_list
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from graphpasses import capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.parity.launch import run_ranks

NUM_STEPS = 3
Loss = Callable[[nn.Module, Tensor], Tensor]


def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    """Each sample against those of all ranks, whose gradients go back."""
    one, other = (functional.normalize(model(each), dim=-1) for each in (x, x + 0.1))
    others = torch.cat(differentiable.all_gather(other))
    labels = torch.arange(len(x)) + dist.get_rank() * len(x)
    return functional.cross_entropy(one @ others.t() / 0.1, labels)


def per_token(model: nn.Module, x: Tensor) -> Tensor:
    """Summed, and divided by the number of tokens of all ranks."""
    num_tokens = (x > 0).sum()
    dist.all_reduce(num_tokens)
    return model(x).square().sum() / num_tokens


def centered(model: nn.Module, x: Tensor) -> Tensor:
    """A buffer follows the mean of all ranks' outputs."""
    y = model(x)
    mean = y.detach().mean(dim=0)
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    center = model.get_buffer("center")
    center.mul_(0.9).add_(mean, alpha=0.1)
    return (y - center).square().mean()


def of_the_loss(model: nn.Module, x: Tensor) -> Tensor:
    """What autograd takes no notice of: the gradient is this rank's."""
    loss = model(x).square().mean()
    all_reduce(loss)
    return loss * 2


def gathered_scores(model: nn.Module, x: Tensor) -> Tensor:
    """Others' scores, without gradients, in one tensor and in a list."""
    y = model(x)
    joined = torch.empty(2 * len(y), y.shape[1])
    all_gather_into_tensor(joined, y.detach())
    apart = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(apart, y.detach().sin())
    return (y * joined.mean(dim=0)).sum() + (y * sum(apart)).mean()


def not_waited(model: nn.Module, x: Tensor) -> Tensor:
    num = torch.ones(())
    work = dist.all_reduce(num, async_op=True)
    loss = model(x).square().sum()
    assert work is not None
    work.wait()
    return loss / num


def sends_objects(model: nn.Module, x: Tensor) -> Tensor:
    lengths = [len(x)]
    broadcast_object_list(lengths, 0)
    return model(x).square().sum() / lengths[0]


def gathers_a_number(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    dist.all_gather_object([None, None], loss.item())
    return loss


def into_strides(model: nn.Module, x: Tensor) -> Tensor:
    """As a router's einsum gives it: gloo puts the bytes where a contiguous tensor would have them."""
    y = model(x).t()
    return differentiable.all_to_all_single(torch.empty_like(y), y.contiguous())[0].sum()


EQUAL: dict[str, Loss] = {
    each.__name__: each for each in (contrastive, per_token, centered, of_the_loss, gathered_scores)
}


def train(loss_fn: Loss, *, captured: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model.register_buffer("center", torch.zeros(4))
    for module in (model[0], model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(NUM_STEPS, 2, 6, 4, generator=torch.Generator().manual_seed(1))[:, dist.get_rank()]
    step, losses = None, []
    for batch in batches:
        if captured and step is None:
            step = default_pipeline().run(capture_train_step(loss_fn, model, batch))
        if step is None:
            loss = loss_fn(model, batch)
            loss.backward()
        else:
            loss = step(batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    whole = [each.full_tensor().detach() for each in model.parameters()]
    return [*losses, *whole, *(each.clone() for each in model.buffers())]


def train_all() -> tuple[dict[str, bool], bool, dict[str, str]]:
    eager = {name: train(loss_fn, captured=False) for name, loss_fn in EQUAL.items()}
    equal = {
        name: all(map(torch.equal, eager[name], train(loss_fn, captured=True))) for name, loss_fn in EQUAL.items()
    }
    alone = train(lambda model, x: model(x).square().sum() / (x > 0).sum(), captured=True)
    messages = {}
    for loss_fn in (not_waited, sends_objects, gathers_a_number, into_strides):
        try:
            train(loss_fn, captured=True)
        except CaptureError as error:
            messages[loss_fn.__name__] = str(error)
    return equal, all(map(torch.equal, eager["per_token"], alone)), messages


@pytest.mark.multiprocess
def test_collectives_of_a_loss() -> None:
    for equal, is_alone_equal, messages in run_ranks(train_all, 2):
        assert equal == dict.fromkeys(EQUAL, True)
        assert not is_alone_equal  # the control
        assert messages["not_waited"].startswith("loss_fn communicates in place: c10d.allreduce_.default")
        assert messages["into_strides"].startswith("loss_fn gives a collective at ")
        assert " in into_strides a tensor that is not contiguous" in messages["into_strides"]
        for name in ("sends_objects", "gathers_a_number"):
            assert messages[name].startswith("loss_fn sends objects to other ranks at ")
            assert f" in {name}, as all_gather_object" in messages[name]
