"""The computed layouts and plans against the buffers that FSDP2 really fills, on four gloo ranks.

Every gradient element has a value of its own, so a buffer tells which parameter lies at which byte.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from graphpasses.errors import PlanError, UnsupportedError
from graphpasses.fsdp import Bucket, BucketPlan, Layout, Reduction, eager_layout, make_bucket_layout
from graphpasses.identity import IdentityMap, preserve_identity
from graphpasses.parity.launch import run_ranks

NUM_RANKS = 4
RANKS = tuple(range(NUM_RANKS))
AVG = Reduction("avg", "avg", dtype=torch.float32)


class Coded(nn.Module):
    """Gives each element of each parameter a gradient that no other element has."""

    next_code = 1

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        children: Mapping[str, nn.Module] | None = None,
        runs: Sequence[str] | None = None,
        unused: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.codes = {}
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.ones(*shape))
            self.register_parameter(name, parameter)
            start, Coded.next_code = Coded.next_code, Coded.next_code + parameter.numel()
            if name not in unused:
                codes = torch.arange(start, Coded.next_code, dtype=torch.float32)
                self.codes[name] = codes.view(*shape)
        for name, child in (children or {}).items():
            self.add_module(name, child)
        self.runs = tuple(children or ()) if runs is None else tuple(runs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, code in self.codes.items():
            parameter = getattr(self, name)
            x = x + (parameter * code.to(parameter.dtype)).sum()
        for name in self.runs:
            x = self.get_submodule(name)(x)
        return x


def post_order_trap() -> Coded:
    """A module with own parameters and parameter-owning children, registered in another order than run."""
    inner = Coded({"gain": (3,)}, {"deep": Coded({"weight": (2, 3)})})
    block = Coded(
        {"scale": (4,), "bias": (5,)},
        {"second": Coded({"weight": (6, 2), "bias": (6,)}), "inner": inner, "first": Coded({"weight": (7,)})},
        runs=("first", "inner", "second"),
    )
    return Coded(
        {"temperature": (1,)}, {"out": Coded({"weight": (8,)}), "block": block}, runs=("block", "out")
    )


def sizes() -> Coded:
    return Coded({f"p{n}": (n, 3) for n in (1, 2, 3, 4, 5, 7, 8, 9)} | {"vector": (6,)})


def language_model() -> Coded:
    layers = nn.ModuleDict(
        {
            str(i): Coded({}, {"attn": Coded({"qkv": (6, 2)}), "mlp": Coded({"up": (4, 2), "bias": (4,)})})
            for i in range(2)
        }
    )
    parts = {
        "norm": Coded({"weight": (3,)}),
        "emb": Coded({"weight": (5, 2)}),
        "layers": layers,
        "out": Coded({"weight": (5, 2), "bias": (5,)}),
    }
    return Coded({}, parts, runs=("emb", "layers.0", "layers.1", "norm", "out"))


def tied() -> Coded:
    model = language_model()
    model.out.weight = model.emb.weight
    return model


def shared_module() -> Coded:
    shared = Coded({"weight": (5,)})
    return Coded({"own": (3,)}, {"a": shared, "between": Coded({"weight": (2,)}), "b": shared})


def unused() -> Coded:
    return Coded(
        {"a": (5,), "idle": (6,), "b": (7,)},
        {"child": Coded({"w": (3,), "idle": (4,)}, unused=["idle"])},
        unused=["idle"],
    )


def frozen() -> Coded:
    model = post_order_trap()
    for name in ("block.second.bias", "block.inner.gain", "out.weight"):
        model.get_parameter(name).requires_grad_(False)
    return model


def even_columns() -> Coded:
    return Coded({"a": (3, 8), "b": (5,), "c": (4, 4, 2), "d": (7, 2)})


def shard_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % NUM_RANKS == 0 else None


def for_all(method: str, *args: Any) -> Callable[[nn.Module], None]:
    def configure(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, method)(*args)

    return configure


def all_of(*configures: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    return lambda model: [configure(model) for configure in configures] and None


@dataclass(frozen=True)
class Case:
    """One model, the ``fully_shard`` calls before the root's, and what the reduction must be."""

    build: Callable[[], nn.Module]
    calls: Sequence[Sequence[str]] = ()
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    configure: Callable[[nn.Module], None] | None = None
    without_gradient: Sequence[str] = ()
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None
    hybrid: bool = False
    reduction: Reduction = AVG


F16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)
CASES = {
    "post_order": Case(post_order_trap, [["block"]]),
    "one_group": Case(post_order_trap),
    "two_modules": Case(language_model, [["layers.0"], ["layers.1"], ["norm", "out"]]),
    "argument_order": Case(language_model, [["out", "layers.0", "norm"]]),
    "nested": Case(post_order_trap, [["block.inner"], ["block"], ["out"]]),
    "nested_argument": Case(post_order_trap, [["block.inner", "block"]]),
    "tied": Case(tied, [["layers.0"], ["emb", "out"]]),
    "tied_in_root": Case(tied, [["layers.0"], ["layers.1"]]),
    "shared_module": Case(shared_module, [["between"]]),
    "sizes": Case(sizes),
    "frozen": Case(frozen, [["block"]]),
    "unused": Case(unused, [["child"]], without_gradient=["idle", "child.idle"]),
    "unused_zeros": Case(
        unused,
        [["child"]],
        without_gradient=["idle", "child.idle"],
        configure=for_all("set_reduce_scatter_unused_params", True),
    ),
    "shard_columns": Case(even_columns, shard_placement_fn=shard_columns),
    "hybrid": Case(post_order_trap, [["block"]], hybrid=True),
    "hybrid_sizes": Case(sizes, hybrid=True),
    "factor_world": Case(
        sizes,
        configure=for_all("set_gradient_divide_factor", 4.0),
        reduction=Reduction("avg", "sum", dtype=torch.float32),
    ),
    "hybrid_factor_shard": Case(
        sizes,
        hybrid=True,
        configure=for_all("set_gradient_divide_factor", 2.0),
        reduction=Reduction("avg", "sum", dtype=torch.float32),
    ),
    "force_sum": Case(
        sizes,
        configure=for_all("set_force_sum_reduction_for_comms", True),
        reduction=Reduction("sum", "sum", postdivide=4.0, dtype=torch.float32),
    ),
    "force_sum_factor_one": Case(
        sizes,
        configure=all_of(
            for_all("set_force_sum_reduction_for_comms", True), for_all("set_gradient_divide_factor", 1.0)
        ),
        reduction=Reduction("sum", "sum", dtype=torch.float32),
    ),
    "fp16": Case(
        sizes,
        policy=F16,
        reduction=Reduction("sum", "sum", predivide=2.0, postdivide=2.0, dtype=torch.float16),
    ),
    "hybrid_fp16": Case(
        sizes,
        policy=F16,
        hybrid=True,
        reduction=Reduction("sum", "sum", predivide=2.0, postdivide=2.0, dtype=torch.float16),
    ),
    "bf16": Case(
        sizes,
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        reduction=Reduction("avg", "avg", dtype=torch.bfloat16),
    ),
    "bf16_reduced_in_fp32": Case(
        sizes, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
}


class Recorder:
    """Stands in for the reduce-scatter: keeps its input, and hands each rank its own row."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], str, str, bytes]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:  # type: ignore[no-untyped-def]
        self.record("reduce_scatter", input_tensor, group, op)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    def record(self, collective: str, tensor: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
        name = "avg" if op == dist.ReduceOp.AVG else "sum" if op == dist.ReduceOp.SUM else str(op)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.calls.append(
            (collective, tuple(dist.get_process_group_ranks(group)), name, dtype, to_bytes(tensor))
        )


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()


def build(case: Case) -> nn.Module:
    Coded.next_code = 1
    return case.build()


def plain_gradients(case: Case) -> dict[str, torch.Tensor]:
    model = build(case)
    model(torch.zeros((), requires_grad=True)).backward()
    return {
        name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()
    }


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

    def record_all_reduce(tensor, op, group):  # type: ignore[no-untyped-def]
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
    assert not torch.equal(
        fill(wrong, NUM_RANKS, gradients, case, 1), fill(right, NUM_RANKS, gradients, case, 1)
    )


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
    for hybrid in (False, True):
        by_one = Case(sizes, hybrid=hybrid, configure=for_all("set_gradient_divide_factor", 1.0))
        plan = BucketPlan.from_fully_shard(shard(by_one, build(by_one)))
        assert {entry.reduction for entry in plan.entries} == {Reduction("sum", "sum", dtype=torch.float32)}


def check_hook_and_dtypes_are_refused() -> None:
    case = Case(sizes)
    model = shard(case, build(case))
    model.set_all_reduce_hook(lambda output: None)
    with pytest.raises(UnsupportedError, match=r"has an all-reduce hook"):
        eager_layout(model)
    plain = build(case)
    plain.p1 = nn.Parameter(plain.p1.to(torch.bfloat16))
    with pytest.raises(
        ValueError, match=r"several dtypes, torch.bfloat16, torch.float32, which FSDP2 refuses"
    ):
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
