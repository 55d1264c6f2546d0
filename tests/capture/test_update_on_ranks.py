"""Captured steps with their optimizer against eager FSDP2 on real ranks: clipping, schedules, checkpoints."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.errors import AgreementError
from graphpasses.fsdp import BucketPlan, eager_layout
from graphpasses.graph import CapturedStep
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import default_pipeline
from tests.helpers.models import next_token_loss, parallelize, same_bits
from tests.helpers.optimizers import Counting, every
from tests.helpers.step_cases import CASES, NUM_RANKS, Batch, differences, local_bits, shard_eagerly

NUM_STEPS = 6
EAGER_STEP = 3  # that one of the captured side is eager, too
LISTS = partial(AdamW, foreach=True)
RELOADED_STEP = 4  # before it, the captured side's optimizer is loaded from its own checkpoint


@dataclass(frozen=True)
class Training:
    """How a model is trained by both.

    Args:
        case: of ``step_cases``: model and sharding.
        optimizer: makes the optimizer.
        clip_norm: None does not clip.
        is_simple: whether the captured model is sharded by SimpleFSDP.
        clip: how eager clips, where that is not torch's way: a control, whose other side is eager, too.
        eager_optimizer: of eager, where it is another: a control.
        num_ranks: four where norms or shards without elements are what is tried, else two.
    """

    case: str
    optimizer: Callable[..., Optimizer]
    clip_norm: float | None = None
    is_simple: bool = False
    clip: Callable[[nn.Module, float], torch.Tensor] | None = None
    eager_optimizer: Callable[..., Optimizer] | None = None
    num_ranks: int = 2

    @property
    def is_control(self) -> bool:
        return not (self.clip is None and self.eager_optimizer is None)


def clip_by_sum_of_squares(model: nn.Module, clip_norm: float) -> torch.Tensor:
    """Clips as one may, too: the squares of all elements are added, not the norms of the parameters."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    squares = torch.stack([(g.to_local() if isinstance(g, DTensor) else g).square().sum() for g in gradients]).sum()
    torch.distributed.all_reduce(squares)
    factor = torch.clamp(clip_norm / (squares.sqrt() + 1e-6), max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor)
    return squares.sqrt()


TRAININGS = {
    "tied": Training("tied", LISTS, num_ranks=4),
    "hybrid_clipped": Training("hybrid", partial(SGD, foreach=True, momentum=0.9, nesterov=True), 0.5, num_ranks=4),
    "tensor_parallel_clipped": Training(
        "tensor_parallel_fp32_reduce", partial(AdamW, foreach=False), 0.5, num_ranks=4
    ),
    "unused": Training("unused", partial(Adagrad, foreach=True, lr_decay=0.1)),
    "simple_tied_clipped": Training("tied", partial(AdamW, fused=True), 0.5, is_simple=True),
    "simple_hybrid": Training("hybrid", partial(Adam, amsgrad=True, maximize=True), is_simple=True, num_ranks=4),
}
# Of somebody's own: one counts in Python, clipped, and one puts other tensors into its state.
OWN = {
    "every_third": Training("unused", partial(Counting, rate=every), 0.5),
    "replaces": Training("tied", partial(Counting, replaces=True, in_group=True)),
}
CONTROLS = {
    "other_eps": Training("tied", LISTS, eager_optimizer=partial(AdamW, foreach=True, eps=1.1e-8)),
    "other_norm": Training("tied", LISTS, clip_norm=0.5, clip=clip_by_sum_of_squares),
}


@dataclass
class Outcome:
    """What one training did: by step, what differs."""

    losses: list[bool] = field(default_factory=list)
    norms: list[bool] = field(default_factory=list)
    weights: list[list[str]] = field(default_factory=list)
    state: list[list[str]] = field(default_factory=list)
    has_gradients: bool = False
    num_parts: int = 0
    notes: tuple[str, ...] = ()
    unproved: tuple[Any, ...] = ()
    proved: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.error and all(self.losses + self.norms) and not any(self.weights + self.state)


def different_state(a: Optimizer, b: Optimizer) -> list[str]:
    one, two = a.state_dict()["state"], b.state_dict()["state"]
    if one.keys() != two.keys():
        return ["parameters"]
    return [
        f"{name} of {index}"
        for index, values in one.items()
        for name, value in values.items()
        if not is_same(value, two[index][name])
    ]


def is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return same_bits(local_bits(value), local_bits(other))
    return repr(value) == repr(other)


def compile_step(
    training: Training, model: nn.Module, eager: nn.Module, optimizer: Optimizer, batch: Batch
) -> CapturedStep:
    options: dict[str, Any] = {"clip_norm": training.clip_norm, "check": training.num_ranks == 2}
    captured = capture_train_step(next_token_loss, model, *batch, optimizer=optimizer, **options)
    if training.is_simple:
        plan = BucketPlan.from_fully_shard(eager)
        return default_pipeline(plan, expected_layout=eager_layout(eager)).run(captured)
    return default_pipeline().run(captured)


def train(training: Training) -> Outcome:
    case = CASES[training.case]
    torch.manual_seed(0)
    model = case.build()
    eager = copy.deepcopy(model)
    if case.tensor_parallel:
        model, eager = (parallelize(each, case.parallel_meshes[1]) for each in (model, eager))
    eager = shard_eagerly(case, eager)
    if training.is_simple:
        dtypes = {"param_dtype": case.policy.param_dtype, "reduce_dtype": case.policy.reduce_dtype}
        model = simple_fsdp(model, case.mesh, shard_dim=case.shard_dim, **dtypes)
    else:
        model = shard_eagerly(case, model)
    makers = (training.eager_optimizer or training.optimizer, training.optimizer)
    optimizers = [make(each.parameters(), lr=1e-2) for make, each in zip(makers, (eager, model), strict=True)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    step, outcome = None, Outcome()
    if not training.is_control:
        step = compile_step(training, model, eager, optimizers[1], case.batch(0))
        assert step.report is not None
        assert step.report.certificate is not None
        last, certificate = step.report.passes[-1], step.report.certificate
        outcome = Outcome(
            num_parts=last.num_rewrites,
            notes=last.notes,
            unproved=certificate.unproved,
            proved=certificate.proved,
        )

    norms: list[torch.Tensor] = []

    def eagerly(module: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
        loss = next_token_loss(module, *batch)
        loss.backward()
        if training.clip_norm is not None:
            clip = training.clip if module is eager else None
            norms.append((clip or clip_parameters)(module, training.clip_norm))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for index in range(NUM_STEPS):
        batch = case.batch(100 * index)
        expected = eagerly(eager, optimizers[0], batch)
        expected_norms = norms[-1:]
        if index == RELOADED_STEP:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        run = step if index != EAGER_STEP or training.is_simple else None
        loss = run(*batch) if run is not None else eagerly(model, optimizers[1], batch)
        for scheduler in schedulers:
            scheduler.step()
        for expected_norm in expected_norms:
            norm = norms[-1] if run is None else run.grad_norm
            assert norm is not None
            outcome.norms.append(same_bits(norm, expected_norm))
        outcome.losses.append(same_bits(loss, expected))
        outcome.weights.append(differences(eager, model, lambda p: p))
        outcome.state.append(different_state(*optimizers))
        outcome.has_gradients |= any(each.grad is not None for each in model.parameters())
    return outcome


def clip_parameters(model: nn.Module, clip_norm: float) -> torch.Tensor:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def train_all() -> dict[str, Outcome]:
    """Runs on every rank."""
    outcomes = {}
    for name, training in (TRAININGS | OWN | CONTROLS).items():
        if training.num_ranks != torch.distributed.get_world_size():
            continue
        try:
            outcomes[name] = train(training)
        except Exception:
            outcomes[name] = Outcome(error=traceback.format_exc())
    if torch.distributed.get_world_size() != NUM_RANKS:
        return outcomes
    for name in ("tied", "hybrid"):
        outcomes[f"other_norms_{name}"] = capture_with_other_norms(name)
    outcomes["other_norms_unchecked"] = capture_with_other_norms("fp32", check=False)
    return outcomes


def capture_with_other_norms(name: str, *, check: bool = True) -> Outcome:
    """Captures with another norm on the last rank, and returns which call refuses that, and how."""
    case = CASES[name]
    model = shard_eagerly(case, case.build())
    norm = 2.0 if torch.distributed.get_rank() == NUM_RANKS - 1 else 1.0
    optimizer = SGD(model.parameters())
    refused_by = "capture"
    try:
        step = capture_train_step(
            next_token_loss, model, *case.batch(0), optimizer=optimizer, clip_norm=norm, check=check
        )
        refused_by = "step"
        step(*case.batch(0))
    except AgreementError as error:
        return Outcome(error=f"{refused_by}: {error}")
    return Outcome()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    launches = [run_ranks(train_all, num_ranks, timeout=300.0) for num_ranks in (NUM_RANKS, 2)]
    return {name: [each[name] for each in ranks] for ranks in launches for name in ranks[0]}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", TRAININGS)
def test_equals_eager(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome.is_equal, f"rank {rank}: {outcome.error or outcome}"
        assert len(outcome.losses) == NUM_STEPS
        assert bool(outcome.norms) == (TRAININGS[name].clip_norm is not None)
        assert not outcome.has_gradients


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", TRAININGS)
def test_update_moves_unless_it_clips(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    outcome = outcomes[name][0]
    if TRAININGS[name].clip_norm is None:
        assert (outcome.num_parts, outcome.notes) == (1, ())
    else:
        note = "parameters are updated after the backward: clipping needs all gradients at once"
        assert (outcome.num_parts, outcome.notes) == (0, (note,))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", TRAININGS)
def test_every_update_is_proved(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes[name]:
        assert not outcome.unproved
        updates = [each for each in outcome.proved if each.startswith("parameter ")]
        assert updates  # clipped ones, too, though they stay behind the step


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", OWN)
def test_optimizers_of_ones_own(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome.is_equal, f"rank {rank}: {outcome.error or outcome}"
        assert not outcome.unproved


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CONTROLS)
def test_control_differs(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    assert not any(each.error for each in outcomes[name])
    assert not all(each.is_equal for each in outcomes[name])
    assert outcomes[name][0].losses[0]


@pytest.mark.multiprocess
def test_refuses_other_norms_on_all_ranks(outcomes: dict[str, list[Outcome]]) -> None:
    named = "{}: ranks {} and {} capture one step with different clip_norm: 1.0 and 2.0. Give all ranks the same"
    elsewhere = "capture: other ranks were given different clip_norm; their messages say which"

    def errors(name: str) -> list[str]:
        return [each.error for each in outcomes[f"other_norms_{name}"]]

    assert errors("tied") == [named.format("capture", 0, 3)] * NUM_RANKS
    assert errors("unchecked") == [named.format("step", 0, 3)] * NUM_RANKS  # one rank may capture for others
    # In a mesh of two axes, rank 0 shares a group with no rank that differs.
    assert errors("hybrid") == [
        elsewhere,
        *(named.format("capture", *pair) for pair in ((1, 3), (2, 3), (1, 3))),
    ]
