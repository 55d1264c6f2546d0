"""Every way to call ``fully_shard``: the captured step against an eager reference on real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from graphpasses._torch.tested_versions import RELEASE
from graphpasses.capture import capture_train_step
from graphpasses.passes import default_pipeline
from tests.helpers.models import NUM_TOKENS, LanguageModel, Short, make_mesh, next_token_loss, token_batch
from tests.helpers.step_cases import (
    NUM_RANKS,
    Batch,
    Outcome,
    check_equals_eager,
    each_outcome,
    outcomes_by_case,
    train_both,
)

NUM_STEPS = 3
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class InTurn(nn.Module):
    """A group that runs twice, and reads other parameters each time."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.even, self.odd = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
            return x + (self.odd if index % 2 else self.even)(x)

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layers = nn.Embedding(NUM_TOKENS, 8), nn.ModuleList([InTurn.Layer()])
        self.head = nn.Linear(8, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for index in range(2):
            x = self.layers[0](x, index)
        return self.head(x)


def layers_only(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)


def per_layer(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=BF16)


def over_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in (*model.layers, model):
        fully_shard(module, mesh=make_mesh(hybrid=True), mp_policy=BF16)


def ignored_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    ignored = {layer.gain for layer in model.layers}
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=BF16, ignored_params=ignored)


def lists(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard([model.layers[1], model.layers[0]], mesh=mesh, mp_policy=BF16)
    fully_shard([model.norm, model.head, model.emb], mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)


def nested(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer.up, mesh=mesh, mp_policy=BF16)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.bfloat16)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=BF16)


def on_several_dims(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in (*model.layers, model):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=BF16,
            shard_placement_fn=lambda p: Shard(int(p.dim() == 2 and p.shape[1] % NUM_RANKS == 0)),
        )


def to_a_smaller_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BF16, reshard_after_forward=2)
    fully_shard(model, mesh=mesh, mp_policy=BF16)


def with_zeros_for_unused(model: nn.Module, mesh: DeviceMesh) -> None:
    model.layers[0].idle = nn.Linear(8, 5)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BF16).set_reduce_scatter_unused_params(True)
    fully_shard(model, mesh=mesh, mp_policy=BF16)


def reduced_as_the_policy_leaves_it(model: nn.Module, mesh: DeviceMesh) -> None:
    """In bfloat16 up to torch 2.14, in float32 from then on."""
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    """As torchtitan's eager trainer has it, whose ranks all hold all parameters."""
    for module in (*model.layers, model):
        replicate(module, mesh=mesh, mp_policy=BF16)


def divided_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 itself divides what it does not scatter, and NCCL multiplies nothing."""
    replicated(model, mesh)
    for module in (*model.layers, model):
        module.set_gradient_divide_factor(3.0)


def sharded_inside(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each layer is a root of its own, which `replicate` does not know."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BF16)
    replicate(model, mesh=mesh, mp_policy=BF16)


def dtypes_by_parameter(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gathered as bytes; gradients of two dtypes are packed into one."""
    gains = {layer.gain for layer in model.layers}
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda p: p.dtype if p in gains else None)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def kept_in_float32(model: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters of bfloat16 whose gradients are reduced and kept in float32, without a policy that says so."""
    model.bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, DeviceMesh], None]]] = {
    shard.__name__: (LanguageModel if shard in (lists, nested) else Short, shard)
    for shard in (
        layers_only,
        ignored_parameters,
        lists,
        nested,
        on_several_dims,
        to_a_smaller_mesh,
        with_zeros_for_unused,
        reduced_as_the_policy_leaves_it,
        replicated,
        divided_replicas,
        sharded_inside,
        *((dtypes_by_parameter, kept_in_float32) if RELEASE >= (2, 15) else ()),
    )
} | {"in_turn": (InTurn, per_layer), "in_turn_over_replicas": (InTurn, over_replicas)}
# Others run on two, where captures compare themselves with eager, and passes are proved.
ON_4_RANKS = ("ignored_parameters", "on_several_dims", "to_a_smaller_mesh", "replicated", "in_turn_over_replicas")


def train(name: str, rank: int) -> Outcome:
    build, shard = CASES[name]
    mesh, models = make_mesh(torch.distributed.get_world_size()), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
        shard(models[-1], mesh)
    reference, model = models
    is_checked = name not in ON_4_RANKS
    captured = capture_train_step(next_token_loss, model, *token_batch(rank), check=is_checked)
    step = default_pipeline().run(captured, prove=None if is_checked else False)
    outcome = Outcome(collectives=captured.collectives())

    def run(index: int, backward: int, batch: Batch) -> torch.Tensor:
        return (captured if index == 1 else step)(*batch)

    train_both(
        outcome,
        reference,
        model,
        lambda seed: token_batch(seed + rank),
        run,
        num_steps=NUM_STEPS,
        # torch's AdamW refuses gradients of another dtype than their parameters'.
        optimizer_class=torch.optim.SGD if name == "kept_in_float32" else torch.optim.AdamW,
    )
    return outcome


def train_all() -> dict[str, Outcome]:
    """Runs on every rank."""
    on_4_ranks = torch.distributed.get_world_size() == NUM_RANKS
    names = [name for name in CASES if (name in ON_4_RANKS) == on_4_ranks]
    return each_outcome(lambda name: train(name, torch.distributed.get_rank()), names)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    return outcomes_by_case(train_all, NUM_RANKS, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    check_equals_eager(outcomes[name], NUM_STEPS)


@pytest.mark.multiprocess
def test_a_group_that_runs_several_times_reduces_what_is_complete(outcomes: dict[str, list[Outcome]]) -> None:
    assert outcomes["in_turn"][0].collectives == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 3}
