"""Hashes across real ranks: how a tensor is sharded must not show, and replicas that differ must."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from graphpasses.errors import GraphPassesError
from graphpasses.parity.compare import compare_runs
from graphpasses.parity.hashing import gradient_hashes, tensor_hash, tensor_hashes, weight_hash, weight_hashes
from graphpasses.parity.launch import run_ranks
from graphpasses.parity.record import ParityRecorder
from graphpasses.parity.run_file import Loss, read_run

SCATTERED = (
    "UnsupportedError: cannot hash 'up.weight': with [_StridedShard(dim=0, sf=2), Replicate()], "
    "a rank's shard is not one contiguous range of the whole tensor (rank 0)"
)
HINT = "synchronise it, or name it in per_rank if each rank holds its own"


def whole_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "even": (8, 4),
        "uneven": (7, 5),
        "rows": (3, 10),
        "short": (1, 6),
        "cube": (5, 6, 7),
        "flat": (9,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.up.bias.requires_grad = False
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.embedding(tokens)).relu())) * self.scale


def trained(model: nn.Module) -> tuple[str, dict[str, str], dict[str, str | None]]:
    """Runs backward; the gradients are small integers over 8, so no order of additions rounds."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.ones_like(parameter))
    model(torch.tensor([[1, 2, 3]])).sum().mul(0.125).backward()
    return weight_hash(model), weight_hashes(model), gradient_hashes(model)


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except GraphPassesError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def hash_on_ranks(folder: str) -> dict[str, Any]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    tensors = whole_tensors()
    found: dict[str, Any] = {"plain": tensor_hashes(tensors)}
    for dim in range(3):
        fit = {name: tensor for name, tensor in tensors.items() if tensor.ndim > dim}
        found[f"shard {dim}"] = tensor_hashes({n: distribute_tensor(t, mesh, [Shard(dim)]) for n, t in fit.items()})
    found["replicate"] = tensor_hashes({n: distribute_tensor(t, mesh, [Replicate()]) for n, t in tensors.items()})
    found["transposed"] = tensor_hash(distribute_tensor(tensors["uneven"], mesh, [Shard(0)]).t())
    found["fsdp"] = trained(fully_shard(Model(), mesh=mesh))
    mean = torch.full((2,), float(rank))
    for kind, own in (("plain", mean), ("partial", DTensor.from_local(mean, mesh, [Partial()]))):
        found[f"own {kind}"] = tensor_hashes({"mean": own}, per_rank={"mean"})["mean"]

    local = torch.ones(3)
    local[1] += rank == num_ranks - 1
    replicated = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    partial = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    crooked = DTensor.from_local(local[: 1 + rank], mesh, [Shard(0)], run_check=False, shape=(9,), stride=(1,))
    found["errors"] = {
        "plain": message_of(lambda: tensor_hashes({"same": torch.ones(2), "bn.mean": local, "other": local})),
        "replicated": message_of(lambda: tensor_hashes({"w": replicated})),
        "partial": message_of(lambda: tensor_hashes({"w": partial})),
        "crooked": message_of(lambda: tensor_hashes({"w": crooked})),
        "kinds": message_of(lambda: tensor_hashes({"w": local.double() if rank == 1 else local})),
        "missing": message_of(lambda: tensor_hashes({} if rank == 1 else {"w": local})),
        "gradient": message_of(lambda: tensor_hashes({"w": None if rank == 1 else local})),
        "on one rank": message_of(lambda: tensor_hashes({"w": local.to_sparse() if rank == 1 else local})),
    }
    found["recording twice"] = record(Path(folder) / f"{num_ranks}.jsonl", mesh)
    if num_ranks == 4:
        found |= hash_on_two_dimensional_meshes(tensors)
    return found


def record(path: Path, mesh: DeviceMesh | None) -> str:
    """Records two steps whose weights and gradients any number of ranks computes alike, but not the loss."""
    rank = 0 if mesh is None else dist.get_rank()
    model = Model() if mesh is None else fully_shard(Model(), mesh=mesh)
    with ParityRecorder(path, seed=0) as recorder:
        recorder.record(-1, None, model)
        trained(model)
        recorder.record(0, torch.tensor(float(rank)), model)
        if mesh is not None:
            partial = DTensor.from_local(torch.ones(()), mesh, [Partial()], run_check=False)
            assert message_of(lambda: recorder.record(1, partial, model)) == (
                "UnsupportedError: cannot record a loss placed as [Partial(sum)]; replicate it first"
            )
            replicated = DTensor.from_local(torch.ones(()), mesh, [Replicate()], run_check=False)
            recorder.record(2, replicated, model)
    return message_of(lambda: ParityRecorder(path))


def hash_on_two_dimensional_meshes(tensors: dict[str, Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = {
        "hsdp": [Replicate(), Shard(0)],
        "shard, replicate": [Shard(1), Replicate()],
        "both": [Shard(0), Shard(1)],
        "one dimension twice": [Shard(0), Shard(0)],
        "replicate twice": [Replicate(), Replicate()],
    }
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.ndim > 1}
    found: dict[str, Any] = {
        name: tensor_hashes({n: distribute_tensor(t, mesh, p) for n, t in matrices.items()})
        for name, p in placements.items()
    }
    found["fsdp hsdp"] = trained(fully_shard(Model(), mesh=mesh))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for dim in (12, 13):
        found[f"tensor parallel {dim}"] = fsdp_over_tensor_parallel(mesh, plan, dim)
    local = torch.ones(3)
    local[2] -= int(dist.get_rank() == 2)
    wrong_replica = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    found["errors hsdp"] = message_of(lambda: tensor_hashes({"a.w": wrong_replica}))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2]
    own = torch.full((2,), float(dist.get_rank() // 2))
    found["group"] = tensor_hash(own, group=group)
    found["replicated on submeshes"] = tensor_hash(distribute_tensor(tensors["even"], mesh["tp"], [Replicate()]))
    whole_mesh = distribute_tensor(tensors["even"], mesh, [Replicate(), Shard(0)])
    found["errors group"] = message_of(lambda: tensor_hash(whole_mesh, group=group))
    submesh = mesh["tp"]
    found["submesh"] = tensor_hash(distribute_tensor(tensors["uneven"], submesh, [Shard(0)]), group=group)
    return found


def fsdp_over_tensor_parallel(mesh: DeviceMesh, plan: dict[str, Any], dim: int) -> tuple[Any, Any, str]:
    torch.manual_seed(3)
    model = nn.Sequential()
    model.add_module("up", nn.Linear(6, dim))
    model.add_module("down", nn.Linear(dim, 6))
    plain = tensor_hashes(dict(model.named_parameters()))
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    weight = model.up.weight
    assert isinstance(weight, DTensor)
    placements = [weight.placements[0], Replicate()]
    local = torch.zeros(6, 6)  # rows 0, 1, 2 and 6, 7, 8 of twelve
    scattered = DTensor.from_local(local, mesh, placements, run_check=False, shape=(12, 6), stride=(6, 1))
    return plain, weight_hashes(model), message_of(lambda: tensor_hashes({"up.weight": scattered}))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {"whole": tensor_hashes(whole_tensors()), "model": trained(Model())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module", params=[2, 4], ids=lambda num_ranks: f"{num_ranks} ranks")
def found(request: pytest.FixtureRequest, folder: Path) -> tuple[int, dict[str, Any]]:
    results = run_ranks(hash_on_ranks, request.param, str(folder))
    for result in results[1:]:
        for key in result.keys() - {"group", "errors group"}:
            assert result[key] == results[0][key], f"ranks must find the same: {key}"
    return request.param, results[0]


@pytest.mark.multiprocess
def test_sharding_does_not_show(found: tuple[int, dict[str, Any]], expected: dict[str, Any]) -> None:
    num_ranks, hashes = found
    layouts = ["plain", "shard 0", "shard 1", "shard 2", "replicate"]
    if num_ranks == 4:
        layouts += ["hsdp", "shard, replicate", "both", "one dimension twice", "replicate twice"]
    for layout in layouts:
        assert hashes[layout] == {name: expected["whole"][name] for name in hashes[layout]}, layout
        assert hashes[layout], layout
    assert hashes["transposed"] == tensor_hash(whole_tensors()["uneven"].t())


@pytest.mark.multiprocess
def test_fsdp_hashes_as_one_rank_does(found: tuple[int, dict[str, Any]], expected: dict[str, Any]) -> None:
    num_ranks, hashes = found
    assert hashes["fsdp"] == expected["model"]
    if num_ranks == 4:
        assert hashes["fsdp hsdp"] == expected["model"]
    _, weights, gradients = hashes["fsdp"]
    assert list(weights) == ["embedding.weight", "up.weight", "up.bias", "down.weight", "down.bias", "scale"]
    assert gradients["up.bias"] is None
    assert sum(digest is None for digest in gradients.values()) == 1


@pytest.mark.multiprocess
def test_strided_shards_of_fsdp_over_tensor_parallel(found: tuple[int, dict[str, Any]]) -> None:
    num_ranks, hashes = found
    if num_ranks != 4:
        pytest.skip("needs a 2 x 2 mesh")
    for dim in (12, 13):
        plain, sharded, scattered = hashes[f"tensor parallel {dim}"]
        assert sharded == plain
        assert scattered == SCATTERED


@pytest.mark.multiprocess
def test_a_group_of_some_ranks(found: tuple[int, dict[str, Any]], expected: dict[str, Any]) -> None:
    num_ranks, hashes = found
    if num_ranks != 4:
        pytest.skip("needs two groups of two")
    assert hashes["group"] == tensor_hash(torch.zeros(2))
    assert hashes["submesh"] == expected["whole"]["uneven"]
    assert hashes["replicated on submeshes"] == expected["whole"]["even"]
    assert hashes["errors group"] == (
        "UnsupportedError: cannot hash 'tensor': ranks [2, 3] of its mesh are not in the group [0, 1] (rank 0)"
    )


@pytest.mark.multiprocess
def test_values_of_each_rank_its_own_are_stacked(found: tuple[int, dict[str, Any]]) -> None:
    num_ranks, hashes = found
    stacked = torch.stack([torch.full((2,), float(rank)) for rank in range(num_ranks)])
    assert hashes["own plain"] == hashes["own partial"] == tensor_hash(stacked)


@pytest.mark.multiprocess
def test_disagreement_raises_on_every_rank(found: tuple[int, dict[str, Any]]) -> None:
    num_ranks, hashes = found
    ranks = list(range(num_ranks))
    differ = f"on ranks {ranks}, but the values of ranks {ranks[:-1]} and {ranks[-1:]} differ"
    lists = "ReplicaMismatchError: ranks 0 and 1 hash different tensors: 'w': torch.float32 [3] on every rank"
    same = "all ranks of the group must hash the same ones"
    refused = "UnsupportedError: cannot hash 'w': its"
    assert hashes["errors"] == {
        "plain": f"ReplicaMismatchError: 'bn.mean' should be the same {differ} (1 more tensors differ too); {HINT}",
        "replicated": f"ReplicaMismatchError: 'w' should be the same {differ}; {HINT}",
        "partial": f"{refused} placement is Partial(sum); redistribute it first (rank 0)",
        "crooked": f"{refused} local shape is [1], but torch shards it into [{-(-9 // num_ranks)}] (rank 0)",
        "kinds": f"{lists} against 'w': torch.float64 [3] on every rank; {same}",
        "missing": f"{lists} against nothing more; {same}",
        "gradient": f"{lists} against 'w': None; {same}",
        "on one rank": f"{refused} layout is torch.sparse_coo; make it dense first (rank 1)",
    }
    if num_ranks == 4:
        assert hashes["errors hsdp"] == (
            "ReplicaMismatchError: 'a.w' should be the same on ranks [0, 2], "
            f"but the values of ranks [0] and [2] differ; {HINT}"
        )


@pytest.mark.multiprocess
def test_runs_of_other_world_sizes_compare(found: tuple[int, dict[str, Any]], folder: Path) -> None:
    num_ranks, hashes = found
    path, alone = folder / f"{num_ranks}.jsonl", folder / f"1-of-{num_ranks}.jsonl"
    assert hashes["recording twice"] == (
        f"RunFileError: '{path}' exists already; name another file, or pass overwrite=True to replace it"
    )
    record(alone, None)
    run = read_run(path)
    assert run.complete
    assert run.header.world_size == num_ranks
    assert run.steps[0].loss is None
    loss = run.steps[1].loss
    assert loss is not None
    assert loss.values == tuple(repr(float(rank)) for rank in range(num_ranks))
    assert run.steps[2].loss == Loss("float32", ("3f800000",) * num_ranks, ("1.0",) * num_ranks)
    assert compare_runs(read_run(alone), run).verdict == "not compared"
    comparison = compare_runs(read_run(alone), run, allow=["ranks", "steps"])
    assert comparison.equal
    assert comparison.notes == (
        f"the runs have 1 and {num_ranks} ranks: each rank's loss is not compared, weights and gradients are",
        "1 steps of run B are not in the other",
    )
