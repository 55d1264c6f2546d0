"""The table of architectures: what is in it, how it is sharded, and what its verdicts mean."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.architectures import __main__ as command
from experiments.architectures import run
from experiments.architectures.cases import CASES, EAGER, GRAPH, Case
from experiments.architectures.train import task
from experiments.architectures.zoo import ARCHITECTURES
from experiments.harness.parity import ParityExperiment, TrainedRun
from experiments.harness.verdict import Comparison, Verdict
from experiments.parity.parts import PARTS
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.fsdp.plan import BucketPlan

BY_NAME = {each.name: each for each in ARCHITECTURES}


def test_the_table_is_large_and_every_family_has_a_control() -> None:
    assert len(BY_NAME) == len(ARCHITECTURES) >= 45
    controlled = {case.architecture.family for case in CASES if case.controls}
    assert controlled == {each.family for each in ARCHITECTURES}
    assert pickle.loads(pickle.dumps(CASES)) == CASES  # they are trained in other processes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_that_is_compared_is_trained(case: Case) -> None:
    eager_refuses = case.variants == (EAGER,)
    assert eager_refuses or {row.variant for row in case.comparisons} == {*case.variants} - {EAGER}


@pytest.mark.parametrize("name", ["gpt2, frozen embeddings", "resnet, BatchNorm", "bart, dropout"])
def test_forward_returns_a_loss_and_batches_differ(name: str) -> None:
    case = Case(BY_NAME[name], torch.bfloat16)
    mine = task(case)
    torch.manual_seed(0)
    model = mine.model()
    batches = [mine.batch(step, rank) for step in (0, 1) for rank in (0, 1)]
    assert mine.loss_fn(model, *batches[0]).dim() == 0
    tensors = [next(iter(inputs.values())) for (inputs,) in batches]
    assert not any(torch.equal(one, other) for i, one in enumerate(tensors) for other in tensors[:i])


def test_layers_and_the_rest_are_sharded() -> None:
    plan = _plan("llama", EAGER)
    assert [entry.fqns[0] for entry in plan.entries] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
    ]


def _plan(name: str, variant: str) -> BucketPlan:
    mine = task(Case(BY_NAME[name], torch.bfloat16), variant)
    with fake_process_group(4):
        model = mine.model()
        mine.shard(model, torch.distributed.init_device_mesh("cpu", (4,)))
        return BucketPlan.from_fully_shard(model)


def test_controls_change_the_groups_or_their_order_alone() -> None:
    eager, order, grouping = (_plan("llama", variant) for variant in (EAGER, *_controls("llama")))
    assert [set(entry.fqns) for entry in order.entries] == [set(entry.fqns) for entry in eager.entries]
    changed = [one.fqns != other.fqns for one, other in zip(order.entries, eager.entries, strict=True)]
    assert changed == [True, True, False]  # two layers, and the rest
    assert len(grouping.entries) == 1


def _controls(name: str) -> tuple[str, ...]:
    return Case(BY_NAME[name], torch.bfloat16).controls


# Architectures with controls are trained by `make parity`: experiments/parity/parts.py.
@pytest.mark.multiprocess
def test_graph_has_eagers_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(steps=1, out=tmp_path, only="resnet, BatchNorm, fp32") == 0
    assert "equal at all 1 steps" in capsys.readouterr().out


def test_make_parity_trains_architectures_with_controls() -> None:
    (part,) = (part for part in PARTS if part.folder == "architectures")
    assert all(case.controls and case.controls[0] in case.variants for case in part.cases)


def _judged(folder: Path, must: str, eager: str, graph: str, failure: str) -> Verdict:
    case = Case(replace(BY_NAME["vit"], refused=must), torch.bfloat16)
    experiment = ParityExperiment("", [case], 1, folder)
    for variant, refused in ((EAGER, eager), (GRAPH, graph)):
        ended = TrainedRun(case.name, variant, failure, facts=refused, seconds=2.0)
        experiment.runs[case.name, variant] = ended
    return run._judge(experiment, case, Comparison(GRAPH, EAGER, "equal"))


@pytest.mark.parametrize(
    ("must", "eager", "graph", "failure", "expected"),
    [
        ("CaptureError: f", "", "CaptureError: for", "", ("be refused", "refused: CaptureError: for", "ok")),
        ("", "", "CaptureError: for", "", ("equal", "refused: CaptureError: for", "wrong")),
        (
            "CaptureError: g",
            "",
            "CaptureError: for",
            "",
            ("be refused", "refused: CaptureError: for", "wrong"),
        ),
        ("eager: V", "eager: ValueError", "", "", ("be refused", "refused: eager: ValueError", "ok")),
        ("", "", "", "KeyError: 'x'", ("equal", "could not be compared: KeyError: 'x'", "not compared")),
    ],
)
def test_a_refusal_is_right_where_it_is_expected(
    tmp_path: Path, must: str, eager: str, graph: str, failure: str, expected: tuple[str, str, str]
) -> None:
    verdict = _judged(tmp_path, must, eager, graph, failure)
    assert (verdict.must, verdict.result, verdict.status) == expected
    assert verdict.cells == ("vision", "2 + 2")


def test_no_such_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(only="lstm") == 2
    assert capsys.readouterr().err.startswith("no case contains 'lstm'; there are: llama, bf16, llama, fp32, ")
