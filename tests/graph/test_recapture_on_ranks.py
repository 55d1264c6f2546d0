"""What is otherwise on one rank alone: it captures a step for that by itself, and the others run theirs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import graphpasses as gp
from graphpasses.graph import CapturedStep, rank_consensus, recapture
from graphpasses.parity.launch import run_ranks
from tests.helpers.models import same_bits

SCALE = [1.0]


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * SCALE[0]


def models(timeout: float = 60.0) -> tuple[nn.Module, nn.Module]:
    """Returns a sharded model and its copy, and seconds that collectives wait."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    # A name of its own: DTensor's caches take meshes of equal ranks and names for one, groups apart.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    both = (model, copy.deepcopy(model))
    for each in both:
        fully_shard(each[0], mesh=mesh)
        fully_shard(each, mesh=mesh)
    return both


def rows(number: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(number, 8, generator=random, device="cpu")


def train(numbers: Iterable[int], change: Callable[[int, nn.Module], object], **options: Any) -> list[Any]:
    """Returns which steps had eager's bits, and how often the step was captured then."""
    (ours, eager), step, seen = models(), None, list[Any]()
    updates = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (ours, eager)]
    options = {"optimizer": updates[0]} if options.pop("updates", False) else {}
    for index, number in enumerate(numbers):
        batch = rows(number, index)
        for each in (ours, eager):
            change(index, each)
        if step is None:
            step = gp.default_pipeline().run(gp.capture_train_step(loss_fn, ours, batch, **options))
        loss = step(batch)
        expected = loss_fn(eager, batch)
        expected.backward()
        for update in updates[1:] if options else updates:
            update.step()
            update.zero_grad()
        weights = [[each.to_local() for each in model.parameters()] for model in (ours, eager)]
        seen.append(same_bits(loss, expected.detach()) and all(map(same_bits, *weights)))
    assert isinstance(step, CapturedStep)
    return [*seen, len(step.captures)]


def nothing(index: int, model: nn.Module) -> None:
    pass


def scale(index: int, model: nn.Module) -> None:
    SCALE[0] = 2.0 if index == 1 and dist.get_rank() == 1 else 1.0


def freeze_late(index: int, model: nn.Module) -> None:
    """All freeze a layer; rank 0 comes later, as one that writes a checkpoint before."""
    if index == 2:
        model[0].requires_grad_(False)
        time.sleep(0.0 if dist.get_rank() else 2.0)


def freeze(index: int, model: nn.Module) -> None:
    model[0].requires_grad_(index < 3)


def many_alone() -> list[Any]:
    """What one rank captured alone does not count where all capture."""
    rank = dist.get_rank()
    with mock.patch.object(recapture, "MAX_STEPS", 2):
        return train([4, 4 + rank, 4 + 2 * rank, 4, 4], freeze)


def says(run: Callable[[], Any]) -> str:
    try:
        run()
    except gp.errors.GraphPassesError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def frozen() -> str:
    """Rank 1 alone freezes a layer, whose gradient the other would reduce."""
    model, _ = models(timeout=4.0)
    step = gp.capture_train_step(loss_fn, model, rows(4, 0))
    model[0].requires_grad_(dist.get_rank() == 0)
    return says(lambda: step(rows(4, 1)))


def accumulated() -> list[Any]:
    """Where gradients wait all ranks run one step: what is another on one alone is refused."""
    model, _ = models(timeout=4.0)
    step = gp.capture_train_step(loss_fn, model, rows(4, 0))
    step(rows(4 - dist.get_rank(), 0))
    step.accumulate(rows(4, 1))
    return [says(lambda: step(rows(4 - dist.get_rank(), 2)))]


def last_moment() -> bool:
    """Rank 1 comes when rank 0 has just waited long enough: they go on together, or both alone."""
    consensus = rank_consensus.RankConsensus([dist.group.WORLD.group_name], torch.device("cpu"))
    if dist.get_rank():
        dist.barrier()
        has_come = consensus.all_come(None)
        dist.barrier()
        return has_come

    def is_late(store: Any, key: str) -> bool:
        is_set.stop()
        dist.barrier()
        dist.barrier()
        return False

    is_set = mock.patch.object(rank_consensus, "_is_set", is_late)
    is_set.start()
    return consensus.all_come(None, patience=timedelta(microseconds=1))


def train_all() -> dict[str, Any]:
    """Runs on two ranks."""
    rank = dist.get_rank()
    mock.patch.object(recapture, "ALONE_AFTER", timedelta(seconds=0.5)).start()
    return {
        "another size": train([4, 4 - rank, 4, 4 - rank], nothing),
        "another size, updated": train([4, 4 - rank, 4 - rank, 4], nothing, updates=True),
        "each its own": train([4, 5 + rank, 4 + 2 * rank, 6], nothing),
        "a value": train([4, 4, 4], scale),
        "late": train([4, 4, 4, 4], freeze_late, updates=True),
        "many alone": many_alone(),
        "last moment": last_moment(),
        "frozen": frozen(),
        "accumulated": accumulated(),
    }


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(train_all, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "nums_captures"),
    [
        ("another size", (1, 2)),
        ("another size, updated", (1, 2)),
        ("each its own", (3, 2)),
        ("a value", (1, 2)),
        ("late", (2, 2)),
        ("many alone", (2, 4)),
    ],
)
def test_one_rank_goes_on_alone(name: str, nums_captures: tuple[int, int], trained: list[dict[str, Any]]) -> None:
    for rank, num_captures in zip(trained, nums_captures, strict=True):
        assert rank[name] == [True] * (len(rank[name]) - 1) + [num_captures]


@pytest.mark.multiprocess
def test_ranks_know_alike_whether_all_came(trained: list[dict[str, Any]]) -> None:
    assert [rank["last moment"] for rank in trained] == [True, True]


@pytest.mark.multiprocess
def test_other_collectives_are_refused(trained: list[dict[str, Any]]) -> None:
    waiting, wrong = (rank["frozen"] for rank in trained)
    assert "on this rank alone, and the step for it launches other collectives" in wrong
    assert waiting.startswith("AgreementError: rank 1 stopped: ")


@pytest.mark.multiprocess
def test_where_gradients_wait(trained: list[dict[str, Any]]) -> None:
    waiting, wrong = (rank["accumulated"][0] for rank in trained)
    assert wrong.startswith("BatchMismatchError: batch[0] differs from the captured batch: expected shape [4, 8]")
    assert waiting.startswith("AgreementError: rank 1 stopped: ")
