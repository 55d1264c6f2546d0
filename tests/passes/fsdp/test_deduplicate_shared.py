"""One placeholder per tensor, one unshard chain per parameter, one lookup and input dist per module and input."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.capture.torch_compile import compile
from graphpasses.embedding.torchrec.fake_kernels import register_fake_kernels
from graphpasses.graph import InputKind, Stage, TrainGraph
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import DeduplicateShared, ReinplaceTBEUpdates
from graphpasses.passes.runner import Pipeline
from tests.helpers.kept import Keep, targets, two_tables
from tests.helpers.models import Even, LanguageModel, Reused, collective_calls, on_fake_ranks, same_bits

aten = torch.ops.aten


def run(graph: TrainGraph) -> tuple[int, TrainGraph]:
    result = Pipeline((DeduplicateShared(),)).run(graph)
    return result.report["deduplicate-shared"].num_rewrites, result


@pytest.mark.parametrize("hybrid", [False, True])
def test_tied_weight_is_read_and_gathered_once(hybrid: bool) -> None:
    with on_fake_ranks(LanguageModel(), hybrid=hybrid) as captured:
        before = captured.collectives()
        num_rewrites, graph = run(captured)
        # The placeholder of the head's local tensor and its all-gather; that of its mesh may have no reader.
        assert num_rewrites in (2, 3)
        assert captured.collectives() == before
        assert graph.collectives() == before | {
            "all_gather_into_tensor": before["all_gather_into_tensor"] - 1
        }
        assert "head.weight" not in {item.fqn for item in graph.inputs}
        assert [item for item in captured.inputs if item.fqn != "head.weight"] == list(graph.inputs)
        assert len(graph.gradient_slots()["emb.weight"]) == 2  # gradients are another pass's


def test_module_that_runs_three_times_is_gathered_once() -> None:
    with on_fake_ranks(Reused()) as captured:
        _, graph = run(captured)
        # block: 7 parameters; mixers: one tied weight and three biases; embedding; head: 2
        assert captured.collectives()["all_gather_into_tensor"] == 7 * 3 + 6 + 3
        assert graph.collectives()["all_gather_into_tensor"] == len(graph.parameters) == 14
        assert graph.collectives()["reduce_scatter_tensor"] == captured.collectives()["reduce_scatter_tensor"]


def test_second_run_changes_nothing() -> None:
    with on_fake_ranks(Reused()) as captured:
        _, once = run(captured)
        num_rewrites, twice = run(once)
        assert num_rewrites == 0
        assert twice.module.code == once.module.code


def test_nothing_shared() -> None:
    with on_fake_ranks(Even()) as captured:
        num_rewrites, graph = run(captured)
        assert num_rewrites == 0
        assert graph.module.code == captured.module.code
        assert graph.report["deduplicate-shared"].notes == ()


def test_same_on_every_rank() -> None:
    calls = []
    for rank in (0, 3):
        with on_fake_ranks(Reused(), rank=rank) as captured:
            _, graph = run(captured)
            calls.append(collective_calls(graph))
    assert calls[0] == calls[1]


def test_fixed_signature_keeps_repeated_placeholders_unread() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        num_rewrites, graph = run(replace(captured, fixed_signature=True))
        assert num_rewrites in (2, 3)
        assert graph.inputs == captured.inputs
        unread = [
            item.fqn for item, node in zip(graph.inputs, graph.placeholders, strict=True) if not node.users
        ]
        assert unread.count("head.weight") == 2
        assert run(graph)[0] == 0


def test_regathered_parameter_is_kept() -> None:
    """A chain of backward was made on purpose: the forward's values were freed."""
    with on_fake_ranks(Even()) as captured:
        graph = captured.copy()
        gather = graph.graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
        )[1]
        (wait,) = gather.users
        reader = graph.graph.find_nodes(op="call_function", target=aten.tanh_backward.default)[-1]
        with graph.graph.inserting_before(reader):
            again = graph.emit(gather.target, gather.args, like=gather)
            again.meta["autograd_backward"] = True
            waited = graph.emit(wait.target, (again,), like=wait)
            waited.meta["autograd_backward"] = True
            value = graph.emit(aten.sum.default, (waited,), like=wait)
            scaled = graph.emit(aten.mul.Tensor, (reader.args[0], value), like=wait)
        reader.replace_input_with(reader.args[0], scaled)
        assert run(graph)[1].collectives()["all_gather_into_tensor"] == 5
        for node in (again, waited):
            node.meta["autograd_backward"] = False
        assert run(graph)[1].collectives()["all_gather_into_tensor"] == 4


def test_chain_that_is_written_is_left_alone() -> None:
    """Eager would gather the second use afresh; one copy would carry the first one's writes."""
    with on_fake_ranks(LanguageModel()) as captured:
        graph = captured.copy()
        gathers = graph.graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
        )
        (wait,) = gathers[0].users
        assert gathers[0].args[0].args[0] in graph.placeholders or gathers[0].args[0].op == "call_function"
        with graph.graph.inserting_before(wait.next):
            graph.emit(aten.mul_.Tensor, (wait, 2.0), like=wait)
        _, result = run(graph)
        before = graph.collectives()["all_gather_into_tensor"]
        notes = result.report["deduplicate-shared"].notes
        assert notes
        assert all("but one of them is written in place: left alone" in note for note in notes)
        assert result.collectives()["all_gather_into_tensor"] in (before, before - 1)


def test_tied_buffers_get_one_placeholder() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.full((3,), 2.0))
            self.register_buffer("again", self.scale)

    model = Model()
    captured = capture_train_step(
        lambda model, x: (model.weight * model.scale * model.again * x).sum(), model, torch.ones(3)
    )
    assert [item.fqn for item in captured.inputs if item.kind is InputKind.BUFFER] == ["scale", "again"]
    num_rewrites, graph = run(captured)
    assert [item.fqn for item in graph.inputs if item.kind is InputKind.BUFFER] == ["scale"]
    assert num_rewrites == 1
    assert graph(torch.ones(3)).item() == 12.0


def test_repeated_casts_count_as_rewrites() -> None:
    """A report of no rewrites promises an unchanged graph."""
    model = nn.Linear(3, 3, bias=False)
    eager = copy.deepcopy(model)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        once = x.bfloat16() @ model.weight.to(torch.bfloat16)
        return (once @ model.weight.to(torch.bfloat16)).float().square().mean()

    captured = capture_train_step(loss_fn, model, torch.ones(2, 3))
    num_rewrites, graph = run(captured)
    assert (num_rewrites == 0) == (graph.module.code == captured.module.code)
    loss = loss_fn(eager, torch.ones(2, 3))
    loss.backward()
    assert same_bits(graph(torch.ones(2, 3)), loss)
    assert same_bits(model.weight.grad, eager.weight.grad)


# ---- lookups and all-to-alls that a shared module repeats ------------------------------------------------

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


@pytest.fixture
def forget_compiled_code() -> None:
    torch._dynamo.reset()


def exchange(x: Tensor, sizes: Any = None) -> Tensor:
    """Exchanges as much with each rank, or as ``sizes`` says."""
    sizes = [x.size(0) // dist.get_world_size()] * dist.get_world_size() if sizes is None else sizes
    group = dist.group.WORLD.group_name
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, group)
    )


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
    pipeline = Pipeline((DeduplicateShared(), keep))
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
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
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
    """Two parents of one EmbeddingBagCollection."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.a, self.b = Scored(bags), Scored(bags)

    def forward(self, features: Any, others: Any = None) -> Tensor:
        return (self.a(features) * 2 + self.b(features if others is None else others).square()).mean()


def sharded(optimizer: str) -> nn.Module:
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
    kinds = {"SGD": torch.optim.SGD, "RowWiseAdagrad": torchrec.optim.RowWiseAdagrad}
    apply_optimizer_in_backward(kinds[optimizer], bags.parameters(), {"lr": 0.1})
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


def train_shared(optimizer: str, num_batches: int) -> tuple[dict[str, int], dict[str, int], int, bool]:
    """Returns the collectives forward and backward, the updates, and whether all is as in eager."""
    torch._dynamo.reset()
    eager, model = sharded(optimizer), sharded(optimizer)
    keep = Keep()
    pipeline = Pipeline((DeduplicateShared(), ReinplaceTBEUpdates(), keep))
    compiled = compile(model, pipeline=pipeline, inner="aot_eager", fullgraph=True)
    is_equal = True
    for step in range(4):
        losses = [call(*(features(step + 50 * i) for i in range(num_batches))) for call in (eager, compiled)]
        for loss in losses:
            loss.backward()
        is_equal &= same_bits(*losses)
    is_equal &= all(same_bits(a, b) for a, b in zip(state(eager), state(model), strict=True))
    assert state(model)
    forward, backward = keep.graphs
    updates = [target for target in targets(backward) if "backward_codegen" in str(target)]
    return forward.collectives(), backward.collectives(), len(updates), is_equal


def on_two_ranks() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.arange(4.0) + 10 * dist.get_rank()
        inputs = (x, x + 100, torch.ones(4, requires_grad=True))
        keep = Keep()
        pipeline = Pipeline((DeduplicateShared(), keep))
        loss = compile(repeats_by_rank, pipeline=pipeline, inner="aot_eager")(*inputs)
        assert same_bits(loss, repeats_by_rank(*inputs))
        return {
            "seen by one rank": targets(keep.graphs[0]).count(ALL_TO_ALL),
            "SGD": train_shared("SGD", 1),
            "RowWiseAdagrad": train_shared("RowWiseAdagrad", 1),
            "two batches": train_shared("RowWiseAdagrad", 2),
        }


@pytest.mark.multiprocess
def test_two_ranks() -> None:
    pytest.importorskip("torchrec")
    first, second = run_ranks(on_two_ranks, 2)
    once, twice = {"all_to_all_single": 8}, {"all_to_all_single": 16}
    back = {"all_to_all_single": 4}
    assert first == {
        "seen by one rank": 5,
        "SGD": (once, back, 4, True),
        "RowWiseAdagrad": (once, back, 4, True),
        "two batches": (twice, back, 4, True),
    }
    assert second == {
        "seen by one rank": 5,
        "SGD": (once, back, 2, True),  # it has rows of one table only
        "RowWiseAdagrad": (once, back, 2, True),
        "two batches": (twice, back, 2, True),
    }


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
    register_fake_kernels()
    eager, model = LooksUpTwice(), LooksUpTwice()
    keep = Keep()
    pipeline = Pipeline((DeduplicateShared(), ReinplaceTBEUpdates(), keep))
    compiled = compile(model, pipeline=pipeline, inner="aot_eager", fullgraph=True)
    offsets = torch.tensor([0, 2, 3, 3, 6])
    for step in range(3):
        ids = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(step))
        eager(ids, offsets).backward()
        compiled(ids, offsets).backward()
    assert all(
        same_bits(a, b) for a, b in zip(eager.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert same_bits(eager.tables.bounds_check_warning, model.tables.bounds_check_warning)
    assert model.tables.bounds_check_warning.item() > 0
    forward, backward = (list(map(str, targets(graph))) for graph in keep.graphs)
    assert sum("codegen_forward" in target for target in forward) == 1
    assert sum("bounds_check_indices" in target for target in forward) == 1
    assert sum("backward_codegen" in target for target in backward) == 2
