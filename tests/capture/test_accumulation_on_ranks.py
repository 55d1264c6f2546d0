"""Microbatches whose gradients wait in FSDP2 for the last one's reduction, eager and captured, on real ranks."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import AgreementError
from graphpasses.parity.launch import run_ranks
from tests.helpers.microbatches import Accumulation, train
from tests.helpers.models import next_token_loss
from tests.helpers.step_cases import CASES, shard_eagerly

KEPT, OBEYED, EAGER = ("none", "accumulate"), ("none", "step"), ("none", "eager")
LAST, EAGER_LAST = ("all", "step"), ("all", "eager")
SHARDS, EAGER_SHARDS = ("shards", "step"), ("shards", "eager")
# Numbers of microbatches, and who runs them, change from step to step.
STEPS = [[KEPT, LAST], [LAST], [KEPT, EAGER, LAST], [EAGER, KEPT, EAGER_LAST], [OBEYED, OBEYED, LAST]]
HYBRID_STEPS = [
    [KEPT, SHARDS, LAST],
    [EAGER_SHARDS, SHARDS, LAST],
    [SHARDS, EAGER_LAST],
    [SHARDS, EAGER, LAST],
]
# For models and shardings, where the steps above are tried with another model.
FEW_STEPS = [[KEPT, LAST], [EAGER, KEPT, EAGER_LAST], [LAST]]
UPDATED = {"updates": True, "clip_norm": 0.5}


def decides(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = next_token_loss(model, tokens, labels)
    return loss * 2 if tokens.sum() % 2 else loss


TRAININGS: dict[str, Accumulation] = {
    "unreduced_dtype": Accumulation(CASES["resharded"], STEPS, check_every=4),
    "reduced_dtype": Accumulation(CASES["fp32_reduce"], STEPS, check_every=4),
    "clipped": Accumulation(CASES["fp32_reduce"], STEPS, **UPDATED),  # type: ignore[arg-type]
    "stays_unsharded": Accumulation(CASES["fp32_reduce"], STEPS, reshards=False, updates=True),
    # Each rank's batches that wait, and its last ones, fall both ways.
    "captured_again": Accumulation(CASES["fp32"], [[KEPT, LAST], [LAST], STEPS[4]], updates=True, loss_fn=decides),
    "recomputed": Accumulation(CASES["recomputed"], FEW_STEPS),
    "unused": Accumulation(CASES["unused"], FEW_STEPS),
    "shard_1": Accumulation(CASES["shard_1"], FEW_STEPS),
    "hybrid": Accumulation(CASES["hybrid"], HYBRID_STEPS, check_every=3),
    "hybrid_clipped": Accumulation(CASES["hybrid_fp16_reduce"], HYBRID_STEPS, **UPDATED),  # type: ignore[arg-type]
    "tensor_parallel_fp32_reduce": Accumulation(CASES["tensor_parallel_fp32_reduce"], FEW_STEPS, updates=True),
}
CONTROLS = ("clipped", "hybrid")
REFUSED = {
    # FSDP2 reduces what has waited when the first of two calls of a module has its gradients, and then the rest.
    "runs_twice": Accumulation(CASES["interleaved"], [[KEPT, LAST]]),
}


def train_all() -> dict[str, list[str]]:
    """Runs on every rank."""
    found: dict[str, list[str]] = {}
    for name, training in (TRAININGS | REFUSED).items():
        if training.case.num_ranks == dist.get_world_size():
            try:
                dropped: list[str] = []
                found[name] = train(training, dropped if name in CONTROLS else None)
                found[f"{name}_dropped"] = dropped
            except Exception as error:
                found[name] = [f"{type(error).__name__}: {error}", traceback.format_exc()]
    if dist.get_world_size() == 2:
        found["other_ranks"] = keep_on_one_rank()
    return found


def keep_on_one_rank() -> list[str]:
    """One rank keeps gradients, the other does not."""
    model = shard_eagerly(CASES["fp32"], CASES["fp32"].build())
    batch = CASES["fp32"].batch(0)
    step = capture_train_step(next_token_loss, model, *batch)
    with pytest.raises(AgreementError) as caught:
        (step.accumulate if dist.get_rank() else step)(*batch)
    return [str(caught.value)]


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[str]]]:
    two, four = (run_ranks(train_all, num_ranks, timeout=300.0) for num_ranks in (2, 4))
    return [{**mine, **(two[rank] if rank < 2 else {})} for rank, mine in enumerate(four)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", TRAININGS)
def test_equals_eager(name: str, found: list[dict[str, list[str]]]) -> None:
    expected, reports = [[]] * TRAININGS[name].case.num_ranks, [each[name] for each in found if name in each]
    assert reports == expected


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CONTROLS)
def test_a_dropped_microbatch_shows(name: str, found: list[dict[str, list[str]]]) -> None:
    for each in found[: TRAININGS[name].case.num_ranks]:
        dropped = each[f"{name}_dropped"]
        assert [text for text in dropped if text.startswith(("gradient", "weight"))]
        assert not [text for text in dropped if text.startswith("loss")]


@pytest.mark.multiprocess
def test_what_fsdp2_reduces_by_itself_is_refused(found: list[dict[str, list[str]]]) -> None:
    for each in found[:2]:
        assert each["runs_twice"][0] == (
            "CaptureError: a gradient of 'mixer.weight' waits to be reduced, or is to wait, and eager FSDP2 reduces "
            "it by itself, not with the next: its module runs several times in a step. Run the last microbatch "
            "eagerly"
        )


@pytest.mark.multiprocess
def test_ranks_that_keep_different_gradients(found: list[dict[str, list[str]]]) -> None:
    texts = [each["other_ranks"][0] for each in found[:2]]
    assert texts[0] == texts[1]
    assert texts[0].startswith("ranks 0 and 1 run one step with different gradients that wait: to wait: none; ")
