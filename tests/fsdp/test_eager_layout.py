"""The computed layouts and plans against the buffers that FSDP2 really fills, on four gloo ranks.

Every gradient element has a value of its own, so a buffer tells which parameter lies at which byte.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from graphpasses.errors import PlanError, UnsupportedError
from graphpasses.fsdp import Bucket, BucketPlan, Layout, Reduction, eager_layout, make_bucket_layout
from graphpasses.identity import IdentityMap, preserve_identity
from graphpasses.parity.launch import run_ranks
from tests.helpers.fsdp2_cases import CASES, NUM_RANKS, Case, build, for_all, sizes, tied

RANKS = tuple(range(NUM_RANKS))


class Recorder:
    """Replaces the reduce-scatter: keeps its input, and hands each rank its own row."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], str, str, bytes]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        self.record("reduce_scatter", input_tensor, group, op)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    def record(self, collective: str, tensor: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
        name = "avg" if op == dist.ReduceOp.AVG else "sum" if op == dist.ReduceOp.SUM else str(op)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.calls.append((collective, tuple(dist.get_process_group_ranks(group)), name, dtype, to_bytes(tensor)))


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()


def plain_gradients(case: Case) -> dict[str, torch.Tensor]:
    model = build(case)
    model(torch.zeros((), requires_grad=True)).backward()
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def shard(case: Case, model: nn.Module) -> nn.Module:
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if case.hybrid
        else init_device_mesh("cpu", (NUM_RANKS,))
    )
    options = {"mesh": mesh, "mp_policy": case.policy, "shard_placement_fn": case.shard_placement_fn}
    for call in case.calls:
        modules = [model.get_submodule(fqn) for fqn in call]
        fully_shard(modules if len(modules) > 1 else modules[0], **options)
    fully_shard(model, **options)
    if case.configure is not None:
        case.configure(model)
    return model


def fill(
    bucket: Any, num_rows: int, gradients: Mapping[str, torch.Tensor], case: Case, predivide: float
) -> torch.Tensor:
    """Builds a reduce-scatter's input from nothing but our layout and each gradient."""
    dtype = getattr(torch, bucket.dtype)
    buffer = torch.zeros(num_rows, bucket.num_bytes // dtype.itemsize, dtype=dtype)
    for entry in bucket.entries:
        gradient = gradients[entry.fqn].to(case.policy.param_dtype or torch.float32).to(dtype)
        assert entry.numel == gradient.numel()
        placement = case.shard_placement_fn and case.shard_placement_fn(gradient)
        for row, chunk in enumerate(gradient.chunk(num_rows, placement.dim if placement else 0)):
            start = entry.offset // dtype.itemsize
            assert chunk.numel() <= entry.padded_numel
            buffer[row, start : start + chunk.numel()] = chunk.reshape(-1)
    return buffer / predivide


def contents(buckets: Sequence[Bucket]) -> dict[tuple[str, ...], Reduction | None]:
    return {bucket.fqns: bucket.reduction for bucket in buckets}


def check_case(case: Case) -> None:
    gradients = plain_gradients(case)
    model = shard(case, build(case))
    plan, layout = (
        BucketPlan.from_fully_shard(model),
        eager_layout(model, without_gradient=case.without_gradient),
    )

    by_modules = BucketPlan.from_modules(case.calls, case.reduction)
    # The order of buckets is that of the tree in one and that of the calls in the other.
    buckets = contents(plan.resolve(model))
    assert buckets == contents(plan.resolve(build(case)))
    assert buckets == contents(by_modules.resolve(model))
    assert buckets == contents(by_modules.resolve(build(case)))

    recorder = Recorder()
    for_all("set_custom_reduce_scatter", recorder)(model)
    all_reduce = dist.all_reduce

    def record_all_reduce(tensor, op, group):
        recorder.record("all_reduce", tensor, group, op)
        return all_reduce(tensor, op=op, group=group)

    with mock.patch.object(dist, "all_reduce", record_all_reduce):
        model(torch.zeros((), requires_grad=True)).backward()

    num_rows = 2 if case.hybrid else NUM_RANKS
    row = dist.get_rank() % num_rows
    expected = []
    local_gradients: dict[str, torch.Tensor] = {}
    for bucket in layout.buckets:
        whole = fill(bucket, num_rows, gradients, case, case.reduction.predivide or 1)
        sent = whole if bucket.collective == "reduce_scatter" else whole[row]
        expected.append((bucket.collective, bucket.ranks, bucket.op, bucket.dtype, to_bytes(sent)))
        # Every rank has the same gradients, so that only HSDP's sum changes the recorder's rows.
        summed = whole[row] * (2 if bucket.collective == "all_reduce" and bucket.op == "sum" else 1)
        for entry in bucket.entries:
            start = entry.offset // whole.dtype.itemsize
            local = summed[start : start + entry.padded_numel] / (case.reduction.postdivide or 1)
            local_gradients[entry.fqn] = local.to(torch.float32)
    assert sorted(recorder.calls) == sorted(expected), [call[:4] for call in recorder.calls]
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            assert name not in local_gradients
            continue
        local = gradient.to_local().reshape(-1)
        assert torch.equal(local, local_gradients[name][: local.numel()]), name


def check_control_pre_order() -> None:
    """``named_parameters()`` order is not the buffer's where a module has parameters and children."""
    case = CASES["post_order"]
    gradients = plain_gradients(case)
    model = build(case)
    block = [(f"block.{n}", tuple(p.shape), 0) for n, p in model.block.named_parameters()]
    wrong = make_bucket_layout("reduce_scatter", RANKS, "avg", torch.float32, block)
    right = eager_layout(shard(case, model)).buckets[0]
    assert sorted(e.fqn for e in wrong.entries) == sorted(e.fqn for e in right.entries)
    assert [e.fqn for e in wrong.entries] != [e.fqn for e in right.entries]
    assert not torch.equal(fill(wrong, NUM_RANKS, gradients, case, 1), fill(right, NUM_RANKS, gradients, case, 1))


def check_ties_in_different_groups() -> None:
    """FSDP2 refuses at the first forward what the plan refuses to resolve."""
    case = Case(tied, [["emb"]])
    with pytest.raises(PlanError, match=r"'emb.weight' and 'out.weight' are in different plan entries"):
        BucketPlan.from_modules(case.calls).resolve(build(case))
    model = shard(case, build(case))
    with pytest.raises(ValueError, match=r"shared with a parameter already managed by another FSDP group"):
        model(torch.zeros((), requires_grad=True))


def check_premul_sum() -> None:
    for factor, hybrid, size in ((3.0, False, "4.0"), (4.0, True, "2.0")):
        case = Case(sizes, hybrid=hybrid, configure=for_all("set_gradient_divide_factor", factor))
        model = shard(case, build(case))
        message = (
            rf"^FSDP2 group '\(root\)' with gradient divide factor {factor} reduces with PREMUL_SUM, "
            r"for which functional collectives have no equivalent; on the eager model call "
            rf"set_force_sum_reduction_for_comms\(True\), or set_gradient_divide_factor\({size}\), "
            r"the size of its shard group$"
        )
        for read in (BucketPlan.from_fully_shard, eager_layout):
            with pytest.raises(UnsupportedError, match=message):
                read(model)
    copies = replicate(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    copies.set_gradient_divide_factor(3.0)  # what scatters nothing is divided, and not by NCCL
    (entry,) = BucketPlan.from_fully_shard(copies).entries
    assert entry.reduction == Reduction("sum", "sum", dtype=torch.float32, predivide=3.0)
    copies.set_force_sum_reduction_for_comms(True)  # torch then divides twice
    (entry,) = BucketPlan.from_fully_shard(copies).entries
    assert entry.reduction == Reduction("sum", "sum", dtype=torch.float32, predivide=3.0, postdivide=3.0)
    for hybrid in (False, True):
        by_one = Case(sizes, hybrid=hybrid, configure=for_all("set_gradient_divide_factor", 1.0))
        plan = BucketPlan.from_fully_shard(shard(by_one, build(by_one)))
        expected = Reduction("sum", "sum", dtype=torch.float32, is_premultiplied=True)
        assert {entry.reduction for entry in plan.entries} == {expected}


def check_hook_and_dtypes_are_refused() -> None:
    case = Case(sizes)
    model = shard(case, build(case))
    model.set_all_reduce_hook(lambda output: None)
    with pytest.raises(UnsupportedError, match=r"has an all-reduce hook"):
        eager_layout(model)
    plain = build(case)
    plain.p1 = nn.Parameter(plain.p1.to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"several dtypes, torch.bfloat16, torch.float32, which FSDP2 refuses"):
        eager_layout(shard(case, plain))


def check_after_a_step() -> None:
    """Reading a model that ran gives what reading it before gave."""
    case = CASES["two_modules"]
    model = shard(case, build(case))
    before = BucketPlan.from_fully_shard(model), eager_layout(model)
    model(torch.zeros((), requires_grad=True)).backward()
    assert (BucketPlan.from_fully_shard(model), eager_layout(model)) == before
    assert Layout.from_json(before[1].to_json()) == before[1]


def check_simple_fsdp_keeps_ties() -> None:
    from torchtitan.experiments.graph_trainer import simple_fsdp

    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("fsdp",))
    for preserve in (True, False):
        model = tied()
        model.norm.weight.requires_grad_(False)
        model.again = model.layers["0"]
        identity = IdentityMap.of(model)
        simple_fsdp._wrap_class_cache.clear()
        if not preserve:  # what data_parallel does by itself
            simple_fsdp.data_parallel(model, mesh, mode="fully_shard")
            assert IdentityMap.of(model).shared_parameters.keys() < identity.shared_parameters.keys()
            assert model._modules["norm"]._parameters["weight"].requires_grad
            continue
        with preserve_identity(model, check_values=True) as names:
            simple_fsdp.data_parallel(model, mesh, mode="fully_shard")
        assert names == identity == IdentityMap.of(model)
        tied_weight = model.emb._parameters["weight"]
        assert isinstance(tied_weight, DTensor)
        assert model.out._parameters["weight"] is tied_weight
        assert tied_weight.requires_grad
        assert not model.norm._parameters["weight"].requires_grad
        plan = BucketPlan.from_modules([["layers.0"], ["emb", "out"]])
        assert plan.resolve(model) == plan.resolve(tied_again())
    simple_fsdp._wrap_class_cache.clear()


def tied_again() -> nn.Module:
    model = tied()
    model.again = model.layers["0"]
    return model


CHECKS: dict[str, Callable[[], None]] = {
    "control_pre_order": check_control_pre_order,
    "ties_in_different_groups": check_ties_in_different_groups,
    "premul_sum": check_premul_sum,
    "hook_and_dtypes": check_hook_and_dtypes_are_refused,
    "after_a_step": check_after_a_step,
}
TITAN_CHECKS = {"simple_fsdp": check_simple_fsdp_keeps_ties}


def run_checks(names: Sequence[str]) -> dict[str, str]:
    """Runs on every rank; returns the traceback of each check, empty if it passed."""
    results = {}
    for name in names:
        try:
            if name in CASES:
                check_case(CASES[name])
            else:
                (CHECKS | TITAN_CHECKS)[name]()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    has_titan = importlib.util.find_spec("torchtitan") is not None
    return run_ranks(run_checks, NUM_RANKS, [*CASES, *CHECKS, *(TITAN_CHECKS if has_titan else ())])


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [*CASES, *CHECKS, *TITAN_CHECKS])
def test_on_four_ranks(name: str, results: list[dict[str, str]]) -> None:
    if name not in results[0]:
        pytest.skip("torchtitan is not installed")
    for rank, outcomes in enumerate(results):
        assert not outcomes[name], f"rank {rank}:\n{outcomes[name]}"
