"""Input dists before output dists, and lookups of sharded modules in one: equal bits, equal order on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn

pytest.importorskip("torchrec")

from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan as plans
from torchrec.optim import RowWiseAdagrad

import graphpasses
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.analysis.effects import launches_collective
from graphpasses.capture.compile_report import CompileReport
from graphpasses.graph import Stage
from graphpasses.ops.reduce_scatter_v import REDUCE_SCATTER_V
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import (
    BucketAllToAll,
    DeduplicateShared,
    FuseTBE,
    HoistInputDists,
    ReinplaceTBEUpdates,
)
from graphpasses.passes.runner import Pipeline
from tests.helpers.recommenders import (
    BATCH_SIZE,
    DIM,
    NUM_ROWS,
    Case,
    Scored,
    bags,
    differences,
    ids,
    sequences,
    state_of,
)
from tests.helpers.tables import Look, model_graph

c10d = torch.ops._c10d_functional
TW0, TW1 = plans.table_wise(rank=0), plans.table_wise(rank=1)
RW, CW = plans.row_wise(), plans.column_wise(ranks=[0, 1])

Batch = tuple[KeyedJaggedTensor, ...]


class Several(nn.Module):
    """Collections one behind the other; a dense layer between them sees those before."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.weighted = bags(1, "u"), bags(2, "i"), bags(2, "w", is_weighted=True)
        self.between = nn.Linear(DIM, 4)
        self.score = nn.Linear(4 + 4 * DIM, 1)

    def forward(self, users: KeyedJaggedTensor, items: KeyedJaggedTensor, weighted: KeyedJaggedTensor) -> Tensor:
        seen = self.between(self.users(users).values()).relu_()
        both = [self.items(items).values(), self.weighted(weighted).values()]
        return self.score(torch.cat([seen, *both], dim=1)).mean()


def several(rank: int, step: int) -> Batch:
    weighted = ids(rank, step, 2, "w", is_weighted=True)
    return (ids(rank, step, 1, "u"), ids(rank, step, 2, "i"), weighted)


class Nested(nn.Module):
    """The second collection looks up what follows from the first one's output, the third does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = bags(1, "a"), bags(1, "b"), bags(1, "c")
        self.score = nn.Linear(3 * DIM, 1)

    def forward(self, first: KeyedJaggedTensor, third: KeyedJaggedTensor) -> Tensor:
        a = self.first(first).values()
        chosen = (a.detach().sum(1) * 100).long().abs() % NUM_ROWS
        second = KeyedJaggedTensor(keys=["bf0"], values=chosen, lengths=torch.ones(BATCH_SIZE, dtype=torch.int64))
        return self.score(torch.cat([a, self.second(second).values(), self.third(third).values()], dim=1)).mean()


class TwoSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Scored(sequences(1), DIM), Scored(sequences(2), DIM)

    def forward(self, left: KeyedJaggedTensor, right: KeyedJaggedTensor) -> Tensor:
        return self.left(left) + self.right(right)


CASES: dict[str, Callable[[], Case]] = {
    # Rank 1 has no table of the users, so its graph has fewer lookups.
    "several": lambda: Case(Several, (TW0, RW, CW, RW, TW0), several, RowWiseAdagrad),
    "nested": lambda: Case(
        Nested, (TW0, TW1, TW0), lambda rank, step: (ids(rank, step, 1, "a"), ids(rank, step, 1, "c"))
    ),
    "sequences": lambda: Case(
        TwoSequences,
        (RW, TW0),
        lambda rank, step: (ids(rank, step, 1), ids(rank, step, 2)),
        torch.optim.Adagrad,
    ),
}


class Compiled:
    """A model compiled as users do; keeps the graph behind the passes of the ``DYNAMO`` stage."""

    def __init__(self, model: nn.Module) -> None:
        torch.compiler.reset()
        self.model, self.backend, self.look = model, CompileReport(), Look()
        passes = (DeduplicateShared(), HoistInputDists(), FuseTBE(), self.look)
        self.call = graphpasses.compile(
            model,
            pipeline=Pipeline((*passes, BucketAllToAll(), ReinplaceTBEUpdates())),
            inner="aot_eager",
            fullgraph=True,
            report=self.backend,
            prove=False,
        )

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def num_rewrites(self, name: str) -> int:
        reports = [report for _, stage, report in self.backend.stages if stage is Stage.DYNAMO]
        return sum(report[name].num_rewrites for report in reports)


def load_state(compiled: Compiled, case: Case) -> list[str]:
    """Returns what goes wrong when a model with fused tables loads an earlier state, or runs eager."""
    model, batches = compiled.model, [case.batch(dist.get_rank(), step) for step in range(3)]
    states = [copy.deepcopy(part) for part in (model.state_dict(), model.fused_optimizer.state_dict())]
    before = state_of(model)
    compiled(*batches[0]).backward()
    model.load_state_dict(states[0])
    model.fused_optimizer.load_state_dict(states[1])
    after = {name: value for name, value in state_of(model).items() if "gradients" not in name}
    wrong = [f"{name} was not loaded" for name in after if not torch.equal(after[name], before[name])]
    losses = [call(*batches[1]).detach() for call in (model, compiled)]
    return wrong + ["eager differs"] * (not torch.equal(*losses))


def check(name: str) -> tuple[list[str], list[str], int]:
    """Trains a case; returns what is wrong, whence its collectives come, and how many lookups were fused."""
    made: list[Compiled] = []

    def compile(model: nn.Module) -> Compiled:
        made.append(Compiled(model))
        return made[-1]

    case = CASES[name]()
    wrong = differences(case, compile)
    (compiled,) = made
    wrong += load_state(compiled, case)
    graph = compiled.look.seen[0]
    order = [str(node.meta["stack_trace"]) for node in graph.graph.nodes if launches_collective(node)]
    return wrong, order, compiled.num_rewrites("fuse-tbe")


def check_cases() -> dict[str, tuple[list[str], list[str], int]]:
    return {name: check(name) for name in CASES}


def test_input_dists_come_first() -> None:
    class Two(nn.Module):
        """Two row-wise tables: each rank gets its ids, looks them up, and reduces what all looked up."""

        def forward(self, first: Tensor, second: Tensor, table: Tensor) -> Tensor:
            outputs = []
            for sent in (first, second):
                received = c10d.wait_tensor(c10d.all_to_all_single(sent, [2, 2], [2, 2], group))
                outputs.append(REDUCE_SCATTER_V(table[received], [2, 2], 0, group, 2))
            return outputs[0] + outputs[1]

    with fake_process_group(2):
        assert dist.group.WORLD is not None
        group = dist.group.WORLD.group_name
        graph = model_graph(Two(), torch.arange(4), torch.arange(4), torch.ones(4, DIM))
        hoisted = Pipeline((HoistInputDists(),)).run(graph)
    calls = [node.name for node in hoisted.graph.nodes if node.op == "call_function"]
    assert hoisted.report is not None
    assert hoisted.report["hoist-input-dists"].num_rewrites == 2
    assert_expected_inline(
        "\n".join(calls),
        """\
all_to_all_single
received
getitem
all_to_all_single_1
received_1
getitem_1
reduce_scatter_v_default
reduce_scatter_v_default_1
add""",
    )


@pytest.mark.multiprocess
def test_ranks_agree_and_bits_stay() -> None:
    ranks = run_ranks(check_cases, 2)
    for name in CASES:
        (wrong, order, _), (wrong_1, order_1, _) = [found[name] for found in ranks]
        assert wrong == wrong_1 == [], name
        assert order == order_1, name
        assert len(set(order)) > len(order) / 3  # the lines tell the modules apart
    num_fused = {name: [found[name][2] for found in ranks] for name in CASES}
    assert num_fused == {"several": [5, 2], "nested": [2, 0], "sequences": [3, 2]}
