"""Models, ``fully_shard`` calls and options of FSDP2, and the reduction that each makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from graphpasses._torch.tested_versions import RELEASE
from graphpasses.fsdp import Reduction

NUM_RANKS = 4
DEFAULT_REDUCE_DTYPE = torch.float32 if RELEASE >= (2, 15) else torch.bfloat16
"""In what FSDP2 reduces the gradients of float32 parameters that compute in bfloat16, if the policy names nothing."""

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
    return Coded({"temperature": (1,)}, {"out": Coded({"weight": (8,)}), "block": block}, runs=("block", "out"))


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
        reduction=Reduction("avg", "avg", dtype=DEFAULT_REDUCE_DTYPE),
    ),
    "bf16_reduced_in_fp32": Case(
        sizes, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
}


def build(case: Case) -> nn.Module:
    Coded.next_code = 1
    return case.build()
