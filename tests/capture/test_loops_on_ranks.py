"""Loops with a second model (a teacher, a reference policy, a GAN's other network), or optimizer, on two ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from graphpasses import capture_train_step, default_pipeline
from graphpasses.errors import CaptureError, GraphPassesError
from graphpasses.parity.hashing import weight_hash
from graphpasses.parity.launch import run_ranks

NUM_STEPS = 3


def network(seed: int, *, out: int = 8, is_sharded: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, out))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if is_sharded:
        fully_shard(model[0], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    torch.manual_seed(100 + torch.distributed.get_rank())
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(is_captured: bool, turns: list[tuple[Callable[..., torch.Tensor], nn.Module, nn.Module, Any]]) -> list[Any]:
    """Takes turns: each loss is of a model, and runs another; returns losses, and hashes of all weights."""
    steps: list[Any] = []
    optimizers = {model: adam(model) for _, model, _, _ in turns}
    found: list[Any] = []
    for _ in range(NUM_STEPS):
        for index, (loss_fn, model, other, make) in enumerate(turns):
            batch = make()
            if not is_captured:
                loss = loss_fn(model, *batch)
                loss.backward()
                optimizers[model].step()
                optimizers[model].zero_grad()
            else:
                if len(steps) == index:
                    step = capture_train_step(loss_fn, model, *batch, others=(other,), optimizer=optimizers[model])
                    steps.append(default_pipeline().run(step))
                loss = steps[index](*batch)
                steps[index].check(*batch)  # runs a teacher that the step has left unsharded, and leaves it so
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            found.append(loss.item())
    return [found, *(weight_hash(each) for _, model, other, _ in turns for each in (model, other))]


def distil(is_captured: bool, *, is_sharded: bool = True, teacher_seed: int = 1) -> list[Any]:
    student, teacher = network(0), network(1, is_sharded=is_sharded).requires_grad_(False)
    if teacher_seed != 1:
        teacher.load_state_dict(network(teacher_seed, is_sharded=is_sharded).state_dict())

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x).float().log_softmax(-1)
        return F.kl_div(model(x).log_softmax(-1), target, log_target=True, reduction="batchmean")

    return train(is_captured, [(loss_fn, student, teacher, lambda: (torch.randn(4, 8),))])


def prefer(is_captured: bool) -> list[Any]:
    """Direct preference optimization: the policy's log-probabilities are compared with those of where it began."""
    policy, reference = network(0), network(0).requires_grad_(False)

    def log_probability(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x).log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            chosen, rejected = log_probability(reference, x, y).chunk(2)
        ours, theirs = log_probability(model, x, y).chunk(2)
        return -F.logsigmoid(0.1 * ((ours - chosen) - (theirs - rejected))).mean()

    return train(is_captured, [(loss_fn, policy, reference, lambda: (torch.randn(8, 8), torch.randint(8, (8,))))])


def compete(is_captured: bool) -> list[Any]:
    """Two steps over the same two networks; each fills gradients of the other one, too, as eager does."""
    generator, critic = network(0), network(1, out=1)

    def of_critic(critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (F.softplus(-critic(x)) + F.softplus(critic(generator(x.flip(0)).detach()))).float().mean()

    def of_generator(generator: nn.Module, z: torch.Tensor) -> torch.Tensor:
        return F.softplus(-critic(generator(z))).float().mean()

    def make() -> tuple[torch.Tensor]:
        return (torch.randn(4, 8),)

    return train(is_captured, [(of_critic, critic, generator, make), (of_generator, generator, critic, make)])


def captured_with_gradients(is_captured: bool) -> list[Any]:
    """Both models hold gradients when the step is captured, to which it adds; the other one is on every rank."""
    generator, critic = network(0), network(1, out=1, is_sharded=False)

    def loss_fn(generator: nn.Module, z: torch.Tensor) -> torch.Tensor:
        return critic(generator(z).float()).mean()

    for step in range(NUM_STEPS):
        z = torch.randn(4, 8)
        if is_captured and step > 0:
            capture_train_step(loss_fn, generator, z, others=(critic,))(z)
        else:
            loss_fn(generator, z).backward()
    parameters = (*generator.parameters(), *critic.parameters())
    return [(each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad).tolist() for each in parameters]


def two_optimizers(is_captured: bool) -> list[Any]:
    """Muon for matrices, whose update gathers them, and AdamW for the rest."""
    model = network(0)
    matrices = [each for each in model.parameters() if each.dim() == 2]
    vectors = [each for each in model.parameters() if each.dim() != 2]
    optimizers = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=1e-2)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()

    step, found = None, []
    for _ in range(NUM_STEPS):
        x = torch.randn(4, 8)
        if is_captured:
            if step is None:
                step = default_pipeline().run(
                    capture_train_step(loss_fn, model, x, optimizer=optimizers, clip_norm=0.1)
                )
            loss = step(x)
        else:
            loss = loss_fn(model, x)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append(loss.item())
    return [*found, weight_hash(model)]


def in_backward(is_captured: bool) -> list[Any]:
    """An optimizer for each parameter, which steps behind its gradient's accumulation."""
    model = network(0)
    optimizers = {each: torch.optim.AdamW([each], lr=1e-2, foreach=False) for each in model.parameters()}
    names, found = {each: fqn for fqn, each in model.named_parameters()}, list[Any]()

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]
        found.append(names[parameter])  # type: ignore[index]

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    step = default_pipeline().run(capture_train_step(loss_fn, model, torch.ones(4, 8))) if is_captured else None
    for _ in range(NUM_STEPS):
        x = torch.randn(4, 8)
        if step is not None:
            step(x)
        else:
            loss_fn(model, x).backward()
    return [found, weight_hash(model)]


def changing(is_captured: bool) -> list[Any]:
    """A number, a dropout's rate and what is trained change between steps, on all ranks."""
    model, settings, step, found = network(0), {"scale": 1.0}, None, list[Any]()
    model[2], optimizer = nn.Dropout(0.1), adam(model)  # type: ignore[operator]

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean() * settings["scale"]

    for index in range(2 * NUM_STEPS):
        x = torch.randn(4, 8)
        settings["scale"] = 1 / (1 + index)
        model[2].p = 0.1 if index < 3 else 0.2  # type: ignore[index]
        model[0].requires_grad_(index % 3 != 1)  # type: ignore[index]
        if is_captured:
            step = step or default_pipeline().run(capture_train_step(loss_fn, model, x))
            found.append(step(x).item())
        else:
            loss = loss_fn(model, x)
            loss.backward()
            found.append(loss.item())
        found.append([each.grad is None for each in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return [found, weight_hash(model)]


def drawing(is_captured: bool) -> list[Any]:
    """Each rank draws numbers of its own from Python's generator, by which it decides, and computes."""
    model = network(0)
    random.seed(torch.distributed.get_rank())

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        share = random.random()
        return (model(x) * (share if share < 0.7 else 0.0)).square().sum()

    x, step, found = torch.randn(4, 8), None, []
    for _ in range(2 * NUM_STEPS):
        if is_captured:
            step = step or default_pipeline().run(capture_train_step(loss_fn, model, x))
            found.append(step(x).item())
        else:
            (loss := loss_fn(model, x)).backward()
            found.append(loss.item())
    return [found, *(parameter.grad.to_local().tolist() for parameter in model.parameters())]  # type: ignore[union-attr]


CASES: dict[str, Callable[[bool], list[Any]]] = {
    "changes between steps": changing,
    "optimizers in backward": in_backward,
    "teacher": distil,
    "teacher on every rank": lambda is_captured: distil(is_captured, is_sharded=False),
    "reference policy": prefer,
    "GAN": compete,
    "captured with gradients": captured_with_gradients,
    "Muon and AdamW": two_optimizers,
    "random numbers of Python": drawing,
}


def with_a_wrong_batch() -> str:
    """Rank 1 gets it; returns what each rank says."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=3))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    step = capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(4, 8), recapture=False)
    try:
        step(torch.ones(4 - torch.distributed.get_rank(), 8))
    except GraphPassesError as error:
        return str(error)
    return ""


def says(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def embedding() -> nn.Module:
    group = torch.distributed.new_group(timeout=timedelta(seconds=3))
    return fully_shard(nn.Embedding(8, 8), mesh=DeviceMesh.from_group(group, "cpu"))


def failing_alone() -> list[str]:
    """What each rank says where rank 1 fails in eager's step, and the others wait for it in a collective."""

    def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(ids).sum()

    ids, models = torch.arange(4), [embedding(), embedding()]
    wrong = ids + 8 * torch.distributed.get_rank()
    step = capture_train_step(loss_fn, models[1], ids)
    found = [says(lambda: capture_train_step(loss_fn, models[0], wrong))]
    torch.distributed.barrier()
    return [*found, says(lambda: step.check(wrong))]


def changed_alone() -> str:
    """What each rank says where rank 1 alone changes what the step has built in."""
    scale = 1.0
    ids = torch.arange(4)
    step = capture_train_step(lambda model, ids: model(ids).sum() * scale, embedding(), ids, recapture=False)
    scale += torch.distributed.get_rank()
    return says(lambda: step(torch.arange(4)))


def unlike_calls() -> str:
    """What each rank says where rank 1 alone does not compare its capture with eager."""

    def call() -> None:
        model = network(0)
        step = capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(4, 8), check=not is_second)
        default_pipeline().run(step)(torch.ones(4, 8))

    is_second = torch.distributed.get_rank() == 1
    return says(call)


def train_all() -> dict[str, tuple[Any, Any]]:
    """Runs on every rank."""
    found: dict[str, tuple[Any, Any]] = {name: (case(False), case(True)) for name, case in CASES.items()}
    found["another teacher"] = found["teacher"][1], distil(False, teacher_seed=2)
    found["unlike calls"] = "", unlike_calls()
    return found | {"a wrong batch": ("", with_a_wrong_batch())}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, tuple[Any, Any]]]:
    return run_ranks(train_all, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_captured_loops_are_eagers(name: str, trained: list[dict[str, tuple[Any, Any]]]) -> None:
    for rank in trained:
        eager, captured = rank[name]
        assert captured == eager


@pytest.mark.multiprocess
def test_the_other_model_counts(trained: list[dict[str, tuple[Any, Any]]]) -> None:
    for rank in trained:
        captured, by_another = rank["another teacher"]
        assert captured != by_another


@pytest.mark.multiprocess
def test_a_wrong_batch_on_one_rank(trained: list[dict[str, tuple[Any, Any]]]) -> None:
    waiting, wrong = (rank["a wrong batch"][1] for rank in trained)
    assert wrong.startswith("batch[0] differs from the captured batch: expected shape [4, 8]")
    assert waiting.startswith(f"rank 1 stopped: BatchMismatchError: {wrong}. This rank waited for it: ")


@pytest.mark.multiprocess
def test_what_one_rank_alone_raises_is_told() -> None:
    for waiting, wrong in zip(*run_ranks(failing_alone, 2), strict=True):
        assert wrong == "IndexError: index out of range in self"
        assert waiting.startswith(f"AgreementError: rank 1 stopped: {wrong}. This rank waited for it: ")


@pytest.mark.multiprocess
def test_what_one_rank_alone_changes() -> None:
    waiting, changed = run_ranks(changed_alone, 2)
    assert changed.startswith("CaptureError: 'scale' was 1.0 when the step was captured, and is 2.0 now; ")
    assert waiting.startswith(f"AgreementError: rank 1 stopped: {changed}. This rank waited for it: ")


@pytest.mark.multiprocess
def test_ranks_that_call_other_things(trained: list[dict[str, tuple[Any, Any]]]) -> None:
    for rank in trained:
        assert rank["unlike calls"][1].startswith("AgreementError: ranks 0 and 1 are at different places: ")


def test_others_that_are_no_tuple_of_models() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match=r"others is Linear; give a tuple of the models .* others=\(teacher,\)"):
        capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2), others=nn.Linear(2, 2))
