"""What a forward pass repeats, lookups and all-to-alls above all, is computed once; updates stay apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture.torch_compile import compile
from graphpasses.graph import ALL_TO_ALL, Stage, TrainGraph
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import DeduplicateLookups, ReinplaceTBEUpdates
from graphpasses.passes.embedding.deduplicate_lookups import _question
from graphpasses.passes.runner import Pipeline
from tests.helpers.all_to_alls import exchange as all_to_all
from tests.helpers.kept import Keep, targets, two_tables
from tests.helpers.models import same_bits

aten = torch.ops.aten


@pytest.fixture
def forget_compiled_code() -> None:
    torch._dynamo.reset()


def exchange(x: Tensor, sizes: Any = None) -> Tensor:
    """Exchanges as much with each rank, or as ``sizes`` says."""
    sizes = [x.size(0) // dist.get_world_size()] * dist.get_world_size() if sizes is None else sizes
    return all_to_all(x, sizes, sizes)


def exchange_counted(x: Tensor, sizes: Tensor) -> Tensor:
    counts = (sizes * torch.tensor([1, 1])).tolist()
    for count in counts:
        torch._check(count >= 0)
    return exchange(x, counts)


def same(x: Tensor) -> Tensor:
    return exchange(x).sum() + exchange(x).max()


def counted(x: Tensor, sizes: Tensor) -> Tensor:
    first, second = exchange_counted(x, sizes), exchange_counted(x, sizes)
    return torch.cat([exchange_counted(first, sizes) + 1, exchange_counted(second, sizes) * 2])


def other_splits(x: Tensor) -> Tensor:
    return exchange(x).sum() + exchange(x, [0, 4] if dist.get_rank() == 0 else [4, 0]).sum()


def other_constants(x: Tensor) -> Tensor:
    return exchange(x * torch.tensor([0.0])).sum() + exchange(x * torch.tensor([-0.0])).sum()


def returned(x: Tensor) -> tuple[Tensor, Tensor]:
    return exchange(x), exchange(x)


def random(x: Tensor) -> Tensor:
    return exchange(torch.rand_like(x)).sum() - exchange(torch.rand_like(x)).sum()


def deduplicated(function: Callable[..., Any], *inputs: Tensor, inner: str = "aot_eager") -> TrainGraph:
    keep = Keep((Stage.JOINT,))
    pipeline = Pipeline((DeduplicateLookups(), keep))
    compile(function, pipeline=pipeline, inner=inner, fullgraph=True)(*inputs)
    (graph,) = keep.graphs
    return graph


@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize(
    ("function", "number"),
    [(same, 1), (other_splits, 2), (other_constants, 2), (returned, 2), (random, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_equal_all_to_alls_are_one(function: Callable[[Tensor], Any], number: int) -> None:
    with fake_process_group(2):
        graph = deduplicated(function, torch.ones(4))
    assert targets(graph).count(ALL_TO_ALL) == number


@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sizes_that_only_running_tells_have_one_name(inner: str) -> None:
    """A repeated read brings a size a second name, by which nobody would know it any more."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True), fake_process_group(2):
        graph = deduplicated(counted, torch.ones(4), torch.tensor([1, 3]), inner=inner)
    assert targets(graph).count(ALL_TO_ALL) == 2
    known: set[Any] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.target is aten._local_scalar_dense.default:
            known |= free_unbacked_symbols(value)
        elif isinstance(value, (Tensor, torch.SymInt)):
            assert free_unbacked_symbols(value) <= known, node
    assert len(known) == 2


def repeats_by_rank(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Only rank 1 sees that ``a`` and ``b`` are equal, and only because of that that ``c`` and ``d`` are."""
    is_first = dist.get_rank() == 0
    a, b = exchange(x), exchange(y if is_first else x)
    c, d = exchange(x if is_first else a), exchange(x if is_first else b)
    e, f = exchange(x * 2), exchange(x * 2)
    return (torch.stack([a + 1, b + 2, c + 3, d + 4, e + 5, f + 6]) * scale).sum()


class Scored(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.score = nn.Linear(8, 1)

    def forward(self, features: Any) -> Tensor:
        return self.score(self.bags(features).values())


class Shared(nn.Module):
    """Two parents of one EmbeddingBagCollection, which is called with one batch twice and with another one."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.a, self.b = Scored(bags), Scored(bags)

    def forward(self, features: Any, others: Any) -> Tensor:
        return (self.a(features) * 2 + self.b(features).square() + self.b(others).sin()).mean()


def sharded() -> nn.Module:
    """One table is on rank 0 alone, the other one has rows on both ranks."""
    import torchrec
    from torchrec.distributed import DistributedModelParallel, sharding_plan
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    torch.manual_seed(0)
    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=20, feature_names=[f"f{i}"])
        for i in range(2)
    ]
    bags = torchrec.EmbeddingBagCollection(tables, device=torch.device("cpu"))
    # Two updates are not their sum's.
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
    shardings = {"t0": sharding_plan.table_wise(rank=0), "t1": sharding_plan.row_wise()}
    plan = sharding_plan.construct_module_sharding_plan(
        bags, shardings, local_size=2, world_size=2, device_type="cpu"
    )
    return DistributedModelParallel(
        Shared(bags),
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan({"a.bags": plan, "b.bags": plan}),
    )


def features(step: int) -> Any:
    """Returns a batch with empty bags, and an id that the first table does not have."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    lengths = torch.randint(0, 4, (6,), generator=generator)
    lengths[0] = 1
    ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    ids[0] = 70
    return KeyedJaggedTensor(keys=["f0", "f1"], values=ids, lengths=lengths)


def state(model: nn.Module) -> list[Tensor]:
    """Returns the tables and optimizer states on this rank, and the counts of bad ids."""
    tbes = [tbe for lookup in model.module.a.bags._lookups for tbe in lookup.modules()]
    return [
        tensor
        for tbe in tbes
        for name, tensor in (*tbe.named_parameters(recurse=False), *tbe.named_buffers(recurse=False))
        if name.startswith(("weights_host", "momentum", "bounds_check_warning"))
    ]


def train_shared() -> tuple[dict[str, int], dict[str, int], int, bool]:
    """Returns the collectives forward and backward, the updates, and whether all is as in eager."""
    torch._dynamo.reset()
    eager, model = sharded(), sharded()
    keep = Keep()
    pipeline = Pipeline((DeduplicateLookups(), ReinplaceTBEUpdates(), keep))
    compiled = compile(model, pipeline=pipeline, inner="aot_eager", fullgraph=True, prove=False)
    is_equal = True
    for step in range(4):
        losses = [call(features(step), features(step + 50)) for call in (eager, compiled)]
        for loss in losses:
            loss.backward()
        is_equal &= same_bits(*losses)
    is_equal &= all(same_bits(a, b) for a, b in zip(state(eager), state(model), strict=True))
    assert state(model)
    forward, backward, late = keep.graphs  # tables are updated after the gradients
    updates = [target for target in targets(late) if "backward_codegen" in str(target)]
    assert late.collectives() == {}
    return forward.collectives(), backward.collectives(), len(updates), is_equal


def on_two_ranks() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.arange(4.0) + 10 * dist.get_rank()
        inputs = (x, x + 100, torch.ones(4, requires_grad=True))
        keep = Keep()
        pipeline = Pipeline((DeduplicateLookups(), keep))
        loss = compile(repeats_by_rank, pipeline=pipeline, inner="aot_eager")(*inputs)
        assert same_bits(loss, repeats_by_rank(*inputs))
        return {
            "seen by one rank": targets(keep.graphs[0]).count(ALL_TO_ALL),
            "shared": train_shared(),
        }


@pytest.mark.multiprocess
def test_two_ranks() -> None:
    pytest.importorskip("torchrec")
    first, second = run_ranks(on_two_ranks, 2)
    # As often as there are batches, and as often as they are looked up.
    forward, backward = {"all_to_all_single": 2 * 8}, {"all_to_all_single": 3 * 2}
    assert first == {"seen by one rank": 5, "shared": (forward, backward, 3 * 2, True)}
    # It has rows of one table only.
    assert second == {"seen by one rank": 5, "shared": (forward, backward, 3, True)}


def test_a_rank_that_sees_a_difference_now_refuses() -> None:
    question = _question([0, 0, 2])
    assert question.combine([[0, 0, 0], [0, 0, 2]]) == [0, 0, 2]
    assert question.contradiction([0, 0, 2], [0, 0, 0]) == ""
    assert question.contradiction([0, 1, 2], [0, 1, 2]) == ""  # another round follows
    assert question.contradiction([0, 0, 2], [0, 1, 2]) == (
        "compiled the joint graph again, and now all-to-alls differ that all ranks agreed to launch as one"
    )


class LooksUpTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = two_tables("EXACT_ADAGRAD")
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        once, again = self.tables(ids.clone(), offsets.clone()), self.tables(ids.clone(), offsets.clone())
        return (self.head(once) * 2 + self.head(again).square()).mean()


@pytest.mark.usefixtures("forget_compiled_code")
def test_one_lookup_and_two_updates() -> None:
    pytest.importorskip("fbgemm_gpu")
    eager, model = LooksUpTwice(), LooksUpTwice()
    keep = Keep()
    pipeline = Pipeline((DeduplicateLookups(), ReinplaceTBEUpdates(), keep))
    compiled = compile(model, pipeline=pipeline, inner="aot_eager", fullgraph=True)
    offsets = torch.tensor([0, 2, 3, 3, 6])
    for step in range(3):
        ids = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(step))
        eager(ids, offsets).backward()
        compiled(ids, offsets).backward()
    assert all(same_bits(a, b) for a, b in zip(eager.state_dict().values(), model.state_dict().values(), strict=True))
    assert same_bits(eager.tables.bounds_check_warning, model.tables.bounds_check_warning)
    assert model.tables.bounds_check_warning.item() > 0
    forward, backward = (list(map(str, targets(graph))) for graph in keep.graphs)
    assert sum("codegen_forward" in target for target in forward) == 1
    assert sum("bounds_check_indices" in target for target in forward) == 1
    assert sum("backward_codegen" in target for target in backward) == 2
