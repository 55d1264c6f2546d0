"""The operator, the module and the rank at which runs of several processes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses._torch.tested_versions import RELEASE
from graphpasses.parity import ParityRecorder, ReplicaMismatchError, locate_runs, read_run
from graphpasses.parity.launch import run_ranks

pytestmark = pytest.mark.multiprocess
NUM_RANKS = 2


class Mean(nn.Module):
    """Divides by a mean over ranks, by a functional collective or in place."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Any = None
        self.op, self.in_place, self.is_missing = "sum", False, False

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach().abs().sum().reshape(1)
        if self.is_missing:
            return x / total
        if not self.in_place:
            return x / all_reduce(total, self.op, self.group or dist.group.WORLD)
        dist.all_reduce(total, op=getattr(dist.ReduceOp, self.op.upper()), group=self.group)
        return x / total


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop, self.act = nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.lin(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.mean, self.counted = Mean(), Mean()
        self.counted.in_place = True
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.counted(self.mean(x)))


def on_rank(rank: int, fault: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda model: fault(model) if dist.get_rank() == rank else None


def sets(fqn: str, name: str, value: Any) -> Callable[[Any], object]:
    return lambda model: setattr(model.get_submodule(fqn), name, value)


def wrong_group(fqn: str, model: Any) -> None:
    halves = [dist.new_group([0]), dist.new_group([1])]
    model.get_submodule(fqn).group = halves[dist.get_rank()]


def scales_reduction(model: Any) -> None:
    model.blocks[0].set_gradient_divide_factor(4.0)
    model.blocks[0].set_force_sum_reduction_for_comms(True)  # gloo has no other


def scales_gradient(model: Any) -> None:
    model.blocks[1].act.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))


def changes_shard(model: Any) -> None:
    shard = model.blocks[1].lin.weight.to_local()
    original = model.blocks[0].forward

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            shard.view(torch.int32)[0, 0] ^= 1  # one bit, when the step has begun
        return original(x)

    model.blocks[0].forward = forward


def low_precision(module: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x.bfloat16(), module.weight.bfloat16(), module.bias.bfloat16()).float()


def computes_low(model: Any) -> None:
    # FSDP's hooks lie around forward
    model.head.forward = partial(low_precision, model.head)


GATHER, REDUCE = "fsdp.gather_parameter", "fsdp.reduce_gradient"
# Fault; then rank, kind, operator, module and what run B gives the operator otherwise.
FAULTS: dict[str, tuple[Callable[[Any], object], tuple[int, str, str, str], str]] = {
    "wrong group": (
        partial(wrong_group, "mean"),
        (0, "result", "_c10d_functional.all_reduce.default", "mean"),
        "ranks=[0]",
    ),
    "wrong group, in place": (
        partial(wrong_group, "counted"),
        (0, "result", "c10d.allreduce_.default", "counted"),
        "ranks=[0]",
    ),
    "wrong reduction": (
        sets("mean", "op", "max"),
        (0, "result", "_c10d_functional.all_reduce.default", "mean"),
        "reduce_op=max",
    ),
    "wrong reduction, in place": (
        sets("counted", "op", "max"),
        (0, "result", "c10d.allreduce_.default", "counted"),
        "",
    ),
    "missing reduction": (
        sets("mean", "is_missing", True),
        (0, "missing", "_c10d_functional.all_reduce.default", "mean"),
        "",
    ),
    "gradients not reduced": (
        lambda model: model.blocks[1].set_requires_gradient_sync(False, recurse=False),
        (0, "missing", REDUCE, "blocks.1.lin"),
        "",
    ),
    "wrong scale of gradients": (
        scales_reduction,
        (0, "result", REDUCE, "blocks.0.lin"),
        "gradient_divide_factor=4.0",
    ),
    "stale shard on a rank": (
        on_rank(1, changes_shard),
        (1, "extra", "aten.bitwise_xor_.Scalar", "blocks.0"),
        "",
    ),
    "dropout seeded alike": (
        on_rank(1, lambda model: torch.manual_seed(100)),
        (1, "inputs", "aten.bernoulli_.float", "blocks.0.drop"),
        "",
    ),
    "changed kernel on a rank": (
        on_rank(1, sets("blocks.1.act", "approximate", "tanh")),
        (1, "result", "aten.gelu.default", "blocks.1.act"),
        "approximate=tanh",
    ),
    "precision lost on a rank": (
        on_rank(1, computes_low),
        (1, "extra", "aten._to_copy.default", "head"),
        "",
    ),
    "gradient scaled on a rank": (
        on_rank(1, scales_gradient),
        (1, "extra", "aten.mul.Tensor", "blocks.1.act"),
        "",
    ),
    "batch of another rank": (
        on_rank(1, lambda model: setattr(model, "batch_of", 0)),
        (1, "start", "", ""),
        "",
    ),
}


def train(
    path: Path,
    fault: Callable[[Any], object] | None,
    reduce_dtype: Any = None,
    operators: Sequence[int] = (1,),
) -> None:
    mesh = dist.init_device_mesh("cpu", (NUM_RANKS,))
    torch.manual_seed(0)
    model: Any = Model()
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for part in (*model.blocks, model.head):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    model.batch_of = dist.get_rank()
    with ParityRecorder(path, operators=operators, overwrite=True) as recorder:
        for step in range(2):
            if step == 1 and fault is not None:
                fault(model)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + model.batch_of))
            with recorder.operators(step, model, [x]):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            with torch.no_grad():  # where gradients are not reduced, there are none
                gradients = None if all(p.grad is not None for p in model.parameters()) else {}
            recorder.record(step, loss, model, gradients)
            optimizer.zero_grad()


def train_replicas(path: Path, *, reduces: bool) -> None:
    """Averages gradients by hand; where that is forgotten, recording meets replicas that differ."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with ParityRecorder(path, operators=[0], overwrite=True) as recorder:
        with recorder.operators(0, model):
            loss = model(torch.full((2, 4), float(dist.get_rank()))).sum()
            loss.backward()
            if reduces:
                dist.all_reduce(model.weight.grad)
                dist.all_reduce(model.bias.grad)
        if reduces:
            recorder.record(0, loss, model)
        else:
            with pytest.raises(ReplicaMismatchError):
                recorder.record(0, loss, model)


def train_all(folder: Path) -> None:
    for reduces in (True, False):
        train_replicas(folder / f"reduces {reduces}.jsonl", reduces=reduces)
    for name, (fault, *_) in FAULTS.items():
        train(folder / f"{name}.jsonl", fault)
    for name in ("eager", "eager again"):
        train(folder / f"{name}.jsonl", None, operators=(0, 1))
    train(folder / "bf16 reductions.jsonl", None, torch.bfloat16, operators=(0,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    run_ranks(train_all, NUM_RANKS, path)
    return path


@pytest.mark.parametrize("name", FAULTS)
def test_finds(name: str, folder: Path) -> None:
    _, expected, argument = FAULTS[name]
    location = locate_runs(read_run(folder / "eager.jsonl"), read_run(folder / f"{name}.jsonl"))
    found = location.difference
    assert found is not None
    operator = found.operator
    place = (operator.operator, operator.where.module) if operator else ("", "")
    assert (found.rank, found.kind, *place) == expected, str(found)
    if argument:
        assert found.other_arguments is not None
        assert argument in found.other_arguments[1]


def test_precision_lost_in_reductions(folder: Path) -> None:
    runs = (read_run(folder / f"{name}.jsonl") for name in ("eager", "bf16 reductions"))
    found = locate_runs(*runs).difference
    assert found is not None
    assert found.operator is not None
    if RELEASE >= (2, 15):  # torch 2.15 casts before it reduces
        assert (found.kind, found.operator.operator) == ("extra", "aten._to_copy.default")
        assert (found.operator.where.module, *found.operator.arguments) == ("head", "dtype=torch.bfloat16")
    else:
        assert (found.kind, found.operator.operator) == ("result", REDUCE)
        assert found.operator.arguments[0] == "head.weight"


def test_names_the_reduction_where_replicas_differ(folder: Path) -> None:
    found = locate_runs(*(read_run(folder / f"reduces {each}.jsonl") for each in (True, False))).difference
    assert found is not None
    assert found.operator is not None
    assert (found.kind, found.operator.operator) == ("missing", "c10d.allreduce_.default")
    assert str(found.operator.where).startswith("reduction of gradients (")


def test_equal_runs_raise_no_alarm(folder: Path) -> None:
    runs = (read_run(folder / f"{name}.jsonl") for name in ("eager", "eager again"))
    assert locate_runs(*runs).difference is None
