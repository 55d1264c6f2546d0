"""Gradients that are the same on any number of ranks: eager FSDP2 and HSDP, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses.errors import UnsupportedError
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.any_cluster import BF16, SHAPES, Training, loss_fn, on_cluster, shard
from tests.helpers.models import NUM_TOKENS, Even, LanguageModel, token_batch

FP32 = MixedPrecisionPolicy()
HOW = {
    "bf16": Training(),
    "accumulated in fp32": Training(accumulate=torch.float32),
    "fp32": Training(policy=FP32),
}
cached = functools.cache(on_cluster)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_one_hash_on_every_mesh(how: Training, shape: Sequence[int]) -> None:
    assert cached(how, tuple(shape)) == cached(how, (1,))


def test_one_hash_where_columns_are_sharded() -> None:
    how = Training(build=Even, shard_dim=1)
    assert len({cached(how, shape) for shape in ((1,), (2,), (2, 2))}) == 1


def test_what_is_added_in_fp32_is_not_rounded() -> None:
    assert len({cached(how, (1,)) for how in HOW.values()}) == len(HOW)


CONTROLS = {
    "FSDP2's own reduction": Training(ranks="own", microbatches="plain"),
    "microbatches one after the other": Training(microbatches="plain"),
    "rank-major microbatches": Training(microbatches="rank-major"),
}


@pytest.mark.parametrize("how", CONTROLS.values(), ids=CONTROLS)
def test_controls_differ(how: Training) -> None:
    assert len({cached(how, (num_ranks,)) for num_ranks in (1, 2, 4)}) == 3


def test_hsdp_by_fsdp2_itself_differs() -> None:
    how = CONTROLS["FSDP2's own reduction"]
    assert len({cached(how, shape) for shape in ((4,), (2, 2), (4, 1))}) == 3


def test_negative_zeros_stay() -> None:
    """HSDP's all-reduce adds -0.0 to what one replica has; 0.0 would make 0.0 of -0.0."""

    values = torch.tensor([0.0, -0.0, 1.0, float("inf"), float("nan"), -1.0, 1e-45, -0.0, 3.0, -0.0, 0.0])

    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(11))

        def forward(self) -> torch.Tensor:
            return (self.weight * values).sum()

    def gradients(shape: tuple[int, ...]) -> torch.Tensor:
        model = gp.canonical_reductions(shard(Times(), shape, FP32))
        model().backward()
        return model.weight.grad.full_tensor().view(torch.int32)

    found = [
        run_cluster(gradients, Topology(4, gpus_per_node=4), shape)[rank]
        for shape in ((4,), (2, 2))
        for rank in range(4)
    ]
    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0][1] == torch.tensor([-0.0]).view(torch.int32)


@pytest.mark.parametrize("is_scaled", [False, True], ids=["over tokens", "scaled by a GradScaler"])
def test_losses_averaged_over_all_tokens(is_scaled: bool) -> None:
    """Microbatches have other sizes; what they have together is a sum of whole numbers."""

    def train(averaged: bool) -> str:
        torch.manual_seed(0)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        model = gp.canonical_reductions(shard(LanguageModel(), (num_ranks,)))
        optimizer, scaler = (
            torch.optim.AdamW(model.parameters()),
            torch.amp.GradScaler("cpu", enabled=is_scaled),
        )
        own = {k: torch.arange(k, k + 4 + 3 * k) % NUM_TOKENS for k in range(rank, 4, num_ranks)}
        count = torch.tensor(sum(len(tokens) - 1 for tokens in own.values()))
        dist.all_reduce(count)
        tree = gp.MicrobatchTree(model)
        for tokens in own.values():
            loss = cross_entropy(model(tokens[:-1]).float(), tokens[1:], reduction="sum")
            scaler.scale(loss / (count if averaged else sum(map(len, own.values())))).backward()
            tree.add()
        tree.finish()
        scaler.step(optimizer)
        return gp.weight_hash(model)

    def on(num_ranks: int, averaged: bool) -> str:
        return str(run_cluster(train, Topology(num_ranks, gpus_per_node=num_ranks), averaged)[0])

    assert on(4, True) == on(2, True) == on(1, True)
    assert on(2, False) != on(1, False)  # control: of a rank's own tokens


def test_an_infinity_in_one_shard_skips_the_step_on_all() -> None:
    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, factors: torch.Tensor) -> torch.Tensor:
            return (self.weight * factors).sum()

    def train(last: float) -> str:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        model = gp.canonical_reductions(shard(Times(), (num_ranks,), FP32))
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
        tree = gp.MicrobatchTree(model)
        for k in range(rank, 4, num_ranks):
            factors = torch.tensor([1.0] * 7 + [last if k == 2 else 1.0])
            scaler.scale(model(factors) / 4).backward()
            tree.add()
        tree.finish()
        scaler.step(optimizer)
        return gp.weight_hash(model)

    def hashes(last: float) -> set[str]:
        return {each for n in (1, 2, 4) for each in run_cluster(train, Topology(n, gpus_per_node=n), last)}

    skipped, updated = hashes(float("inf")), hashes(1.0)
    assert len(skipped) == len(updated) == 1
    assert skipped != updated  # control


# ---- what is refused ----------------------------------------------------------------------------------------------


def refused(num_ranks: int, make: Callable[[], nn.Module], match: str, **options: torch.dtype) -> None:
    with fake_process_group(num_ranks), pytest.raises(UnsupportedError, match=match):
        gp.canonical_reductions(make(), **options)


def on(*shape: int, policy: MixedPrecisionPolicy = BF16) -> Callable[[], nn.Module]:
    return lambda: shard(LanguageModel(), shape, policy)


def test_ranks_that_are_no_power_of_two() -> None:
    refused(6, on(6), r"'layers\.0' is reduced over 6 ranks, and a binary tree needs .*: take 4 or 8$")
    refused(6, on(3, 2), "is reduced over 3 ranks, and a binary tree needs a power of two: take 2 or 4$")


def test_replicas_of_one_shard() -> None:
    refused(4, on(4, 1), r"has replicas of one shard, .*Shard over the ranks instead \(with expert")


def test_a_mesh_in_another_order() -> None:
    def permuted() -> nn.Module:
        return fully_shard(nn.Linear(2, 2), mesh=DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b")))

    refused(4, permuted, r"is reduced over the ranks \[0, 2, 1, 3\], .*Make the mesh with init_device_mesh$")


def test_a_model_without_groups_and_parameters_without_reduction() -> None:
    refused(2, lambda: nn.Linear(2, 2), "no FSDP2 parameter group")

    def partly() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
        return model

    refused(2, partly, r"parameter '1\.weight' is trained, and FSDP2 does not reduce its gradient")


def test_gradients_that_are_kept_rounded() -> None:
    reduced_wider = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def low() -> nn.Module:
        return shard(LanguageModel().bfloat16(), (2,), reduced_wider)

    refused(2, low, r"keeps gradients in torch\.bfloat16, which would round the sums .*added in torch\.float32")
    refused(
        2,
        on(2, policy=FP32),
        "sends torch.float32, which torch.bfloat16 would round",
        accumulate=torch.bfloat16,
    )


def test_sums_over_shards_alone() -> None:
    def backward() -> None:
        model = gp.canonical_reductions(shard(LanguageModel(), (2, 2)))
        model.set_requires_all_reduce(False)
        with pytest.raises(UnsupportedError, match="reduced over its shards and not over its replicas"):
            loss_fn(model, *token_batch(0)).backward()

    run_cluster(backward, Topology(4, gpus_per_node=4))


def test_buffers_in_another_order() -> None:
    """FSDP2 allocates a reduction's input, then its output; told apart wrongly, the sum would be rounded."""

    def reduce() -> None:
        model = gp.canonical_reductions(shard(LanguageModel(), (2,)), accumulate=torch.float32)
        comm = fsdp_groups(model)[0]._reduce_scatter_comm
        options = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
        given = comm.allocate((8,), **options)
        output, again = (comm.allocate((4,), **options) for _ in range(2))
        assert (given.dtype, output.dtype, again.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
        comm(output, given.zero_(), dist.group.WORLD, dist.ReduceOp.SUM)
        with pytest.raises(UnsupportedError, match=r"its output is torch\.bfloat16, and the sum torch\.float32"):
            comm(again, given, dist.group.WORLD, dist.ReduceOp.SUM)

    run_cluster(reduce, Topology(2, gpus_per_node=2))


def test_misuse_of_a_microbatch_tree() -> None:
    def misuse() -> None:
        model = shard(LanguageModel(), (2,))
        with pytest.raises(UnsupportedError, match=r"'layers\.0' adds ranks in NCCL's order; call canonical_red"):
            gp.MicrobatchTree(model)
        gp.canonical_reductions(model)
        tree = gp.MicrobatchTree(model)
        with pytest.raises(UnsupportedError, match="no microbatch was added"):
            tree.finish()
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        loss_fn(model, *token_batch(0)).backward()
        with pytest.raises(UnsupportedError, match=r"no parameter has a reduced gradient: call add\(\) after"):
            tree.add()
        model.set_requires_gradient_sync(True)
        loss_fn(model, *token_batch(0)).backward()
        tree.add()
        loss_fn(model, *token_batch(1)).backward()
        model.norm.weight.grad = None
        with pytest.raises(UnsupportedError, match=r"'norm\.weight' has a gradient in some microbatches and none"):
            tree.add()
        tree.finish()
        loss_fn(model, *token_batch(1)).backward()  # without zero_grad
        with pytest.raises(UnsupportedError, match=r"still has the last step's sum: call optimizer\.zero_grad"):
            tree.add()

    run_cluster(misuse, Topology(2, gpus_per_node=2))


def test_the_sampler_deals_the_same_microbatches() -> None:
    generator = torch.Generator()
    samples = torch.utils.data.RandomSampler(range(53), generator=generator)

    def dealt(num_ranks: int) -> list[list[int]]:
        parts = []
        for rank in range(num_ranks):
            generator.manual_seed(3)
            parts.append(list(gp.MicrobatchSampler(samples, 3, 8, rank=rank, num_ranks=num_ranks)))
        return [batch for together in zip(*parts, strict=True) for batch in together]

    assert len(dealt(1)) == 16
    assert dealt(1) == dealt(2) == dealt(8)
    with pytest.raises(UnsupportedError, match="3 ranks do not divide the 8 microbatches of a global batch"):
        gp.MicrobatchSampler(range(9), 1, 8, rank=0, num_ranks=3)
    # Control: torch's sampler puts other samples into a rank's batches.
    usual = torch.utils.data.DistributedSampler(range(48), 2, 0, shuffle=False)
    assert list(usual)[:3] == [0, 2, 4]


def test_any_number_of_microbatches_that_the_ranks_divide() -> None:
    """12 are no power of two: what is left of the binary counter is added from its end."""

    def gradient() -> str:
        torch.manual_seed(0)
        model = gp.canonical_reductions(shard(LanguageModel(), (dist.get_world_size(),)))
        tree = gp.MicrobatchTree(model)
        for k in range(dist.get_rank(), 12, dist.get_world_size()):
            loss_fn(model, *token_batch(k)).backward()
            tree.add()
        tree.finish()
        return str(gp.parity.gradient_hashes(model))

    found = {run_cluster(gradient, Topology(n, gpus_per_node=n))[0] for n in (1, 2, 4)}
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_captured_steps_have_the_hash_of_eager_ones(shape: tuple[int, ...]) -> None:
    for how in (HOW["bf16"], HOW["accumulated in fp32"]):
        assert on_cluster(dataclasses.replace(how, captured=True), shape) == cached(how, (1,))


def test_a_buffer_that_a_microbatch_writes() -> None:
    class Counting(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.batch = nn.BatchNorm1d(NUM_TOKENS)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.batch(super().forward(tokens).flatten(0, 1))

    with fake_process_group(2):
        model = gp.canonical_reductions(shard(Counting(), (2,), FP32))
        for training in (False, True):
            model.batch.train(training)
            tree = gp.MicrobatchTree(model)
            model(token_batch(0)[0]).sum().backward()
            if not training:
                tree.add()
                continue
            with pytest.raises(UnsupportedError, match=r"writes the buffer 'batch\.\w+' .*its module, write it from"):
                tree.add()
