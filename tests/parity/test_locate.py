"""The operator at which two recorded runs part: faults of one process, each beside a run without."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from graphpasses._torch.recorded_operator import Operator
from graphpasses.commands import app
from graphpasses.errors import RunFileError
from graphpasses.parity import ParityRecorder, compare_runs, locate_runs, read_run
from graphpasses.parity.operators import operator_file, read_operators
from graphpasses.parity.record_operators import operators_recorded
from tests.helpers import faults
from tests.helpers.faults import Fault, changes_loss, gives, optimizes, runs, sets

# Fault, then what is to be found: kind, operator, module, whether in backward, and what differs.
FAULTS: dict[str, tuple[Fault, str, str, str, bool, tuple[str, ...]]] = {
    "wrong scale": (
        sets("layers.1.attention", "scale", 0.25),
        *("result", "aten.mul.Tensor", "layers.1.attention", False, ("result 0",)),
    ),
    "dropout seeded unlike": (
        lambda trainer: torch.manual_seed(7),
        *("inputs", "aten.bernoulli_.float", "layers.0.attention.drop", False, ("random state",)),
    ),
    "another rate of dropout": (
        sets("layers.1.attention.drop", "p", 0.2),
        *("result", "aten.bernoulli_.float", "layers.1.attention.drop", False, ("result 0",)),
    ),
    "no dropout in one layer": (
        sets("layers.1.attention.drop", "training", False),
        *("missing", "aten.bernoulli_.float", "layers.1.attention.drop", False, ()),
    ),
    "changed kernel": (
        sets("layers.0.act", "approximate", "tanh"),
        *("result", "aten.gelu.default", "layers.0.act", False, ("result 0",)),
    ),
    "another epsilon": (
        sets("layers.1.norm", "eps", 1e-3),
        *("result", "aten.native_layer_norm.default", "layers.1.norm", False, ("result 0", "result 2")),
    ),
    "precision lost in one layer": (
        runs("layers.1.up", faults.low_precision),
        *("extra", "aten._to_copy.default", "layers.1.up", False, ()),
    ),
    "stale weight": (
        runs("layers.1.down", faults.stale),
        *("inputs", "aten.addmm.default", "layers.1.down", False, ("mat2",)),
    ),
    "one bit flipped": (
        runs("layers.0.act", faults.flips_bit),
        *("extra", "aten.bitwise_xor_.Scalar", "layers.0.act", False, ()),
    ),
    "NaN written in place": (
        runs("layers.0.act", faults.writes_nan),
        *("extra", "aten.fill_.Scalar", "layers.0.act", False, ()),
    ),
    "saved value overwritten": (
        runs("layers.0.act", faults.overwrites),
        *("extra", "aten.mul_.Tensor", "layers.0.act", False, ()),
    ),
    "NaN just before the loss": (
        changes_loss(lambda loss: loss * float("nan")),
        *("extra", "aten.mul.Tensor", "", False, ()),
    ),
    "loss rounded": (
        changes_loss(lambda loss: loss.bfloat16().float()),
        *("extra", "aten._to_copy.default", "", False, ("loss",)),
    ),
    "stale gradient": (
        lambda trainer: setattr(trainer.model.layers[1].up.bias, "grad", torch.ones(8)),
        *("extra", "aten.add_.Tensor", "layers.1.up", True, ()),
    ),
    "lost residual": (
        runs("layers.0", faults.without_residual),
        *("missing", "aten.add.Tensor", "layers.0", False, ()),
    ),
    "additions in another order": (
        runs("layers.0", faults.other_order),
        *("inputs", "aten.add.Tensor", "layers.0", False, ("self",)),
    ),
    "detached": (
        runs("layers.1", faults.detached),
        *("missing", "aten.mm.default", "layers.1.up", True, ()),
    ),
    "frozen weight": (
        lambda trainer: trainer.model.get_parameter("layers.1.up.weight").requires_grad_(False),
        *("missing", "aten.mm.default", "layers.1.up", True, ()),
    ),
    "statistics of evaluation": (
        sets("norm", "training", False),
        *("missing", "aten.add_.Tensor", "norm", False, ()),  # num_batches_tracked
    ),
    "another momentum of statistics": (
        sets("norm", "momentum", 0.2),
        *(
            "result",
            "aten.native_batch_norm.default",
            "norm",
            False,
            ("written running_mean", "written running_var"),
        ),
    ),
    "index that gets no gradient": (
        sets("emb", "padding_idx", 2),
        *("result", "aten.embedding_dense_backward.default", "emb", True, ("result 0",)),
    ),
    "smoothed labels": (
        gives("label_smoothing", 0.1),
        *("extra", "aten.sum.dim_IntList", "", False, ()),
    ),
    "gradients not clipped": (
        gives("clip", False),
        *("missing", "aten._foreach_norm.Scalar", "", False, ()),
    ),
    "tied weight updated twice": (
        gives("num_updates_of_tied", 2),
        *("extra", "aten.add_.Tensor", "", False, ("weight of emb.weight",)),
    ),
    "another learning rate": (
        optimizes(lr=0.2),
        *("result", "aten.add_.Tensor", "", False, ("result 0",)),
    ),
    "another batch": (
        gives("batch", lambda tokens: tokens.roll(1)),
        *("start", "", "", False, ("batch[0]",)),
    ),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.train(tmp_path_factory.mktemp("runs") / "eager.jsonl")


@pytest.mark.parametrize("name", FAULTS)
def test_finds(name: str, reference: Path, tmp_path: Path) -> None:
    fault, kind, operator, module, in_backward, values = FAULTS[name]
    other = faults.train(tmp_path / "other.jsonl", fault)
    found = locate_runs(read_run(reference), read_run(other)).difference
    assert found is not None
    assert found.kind == kind
    if found.operator is not None:
        assert found.operator.operator == operator
        assert (found.operator.where.module, found.operator.where.in_backward) == (module, in_backward)
    if values:
        assert found.values == values


def test_equal_runs_raise_no_alarm(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = faults.train(tmp_path / "other.jsonl")
    assert app.main(["locate", str(reference), str(other)]) == 0
    assert capsys.readouterr().out == "equal: nothing differs\n"


def test_recording_leaves_the_bits_of_the_run(reference: Path, tmp_path: Path) -> None:
    unrecorded = faults.train(tmp_path / "unrecorded.jsonl", operators=())
    assert compare_runs(read_run(reference), read_run(unrecorded)).equal
    assert not (tmp_path / "unrecorded.jsonl.operators").exists()


def test_what_is_computed_otherwise_and_yet_equal(reference: Path, tmp_path: Path) -> None:
    """Each layer's norm computed a second time, and its sum in another place: no bits change."""
    both = runs("layers.0.act", lambda trainer, module, x: nn.functional.gelu(x + 0) * 1)
    other = faults.train(tmp_path / "other.jsonl", both)
    assert locate_runs(read_run(reference), read_run(other)).difference is None
    both = runs("layers.0.act", lambda trainer, module, x: nn.functional.gelu(x + 0) * 1.5)
    other = faults.train(tmp_path / "third.jsonl", both)
    found = locate_runs(read_run(reference), read_run(other)).difference
    # gelu itself is the same in both; what B makes of its result is not
    assert found is not None
    assert str(found).startswith("rank 0, step 1: aten.mul.Tensor in the forward of module 'layers.0.act' (")


@pytest.mark.parametrize(("by", "kind"), [(1.0, None), (1.5, "extra")])
def test_a_gradient_that_parts_and_a_weight_that_hides_it(by: float, kind: str | None, tmp_path: Path) -> None:
    """The update is too small for the weight: only the gradient, which the step ends with, tells."""
    for name in "ab":
        model = nn.Linear(2, 2, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-20, foreach=False)
        x = torch.ones(3, 2)
        with ParityRecorder(tmp_path / f"{name}.jsonl", operators=[0]) as recorder:
            with recorder.operators(0, model, [x]):
                y = model(x)
                if name == "b" and by != 1:
                    y.register_hook(lambda gradient: gradient * by)
                y.sum().backward()
                optimizer.step()
            recorder.record(0, 1.0, model)
    found = locate_runs(*(read_run(tmp_path / f"{name}.jsonl") for name in "ab")).difference
    assert (found and found.kind) == kind
    if found is not None:
        assert found.operator is not None
        assert found.operator.operator == "aten.mul.Tensor"
        assert found.operator.where.in_backward


def test_what_a_branch_is_decided_by(tmp_path: Path) -> None:
    """The sign that B does not change decides whether weights are updated: no tensor is computed of it."""
    for name in "ab":
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        with ParityRecorder(tmp_path / f"{name}.jsonl", operators=[0]) as recorder:
            with recorder.operators(0, model):
                loss = model(torch.ones(3, 2)).sum()
                loss.backward()
                decides = loss.detach().neg() if name == "a" else loss.detach()
                if decides.item() < 0:
                    optimizer.step()
            recorder.record(0, loss, model)
    found = locate_runs(*(read_run(tmp_path / f"{name}.jsonl") for name in "ab")).difference
    assert found is not None
    assert found.operator is not None
    assert (found.kind, found.operator.operator) == ("missing", "aten.neg.default")


def test_a_gradient_of_one_run_alone(tmp_path: Path) -> None:
    """No optimizer is enclosed: the gradient itself is what the step ends with."""
    for name in "ab":
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        model.weight.requires_grad_(name == "b")
        with ParityRecorder(tmp_path / f"{name}.jsonl", operators=[0]) as recorder:
            with recorder.operators(0, model):
                loss = model(torch.ones(3, 2)).sum()
                loss.backward()
            recorder.record(0, loss, model)
    found = locate_runs(*(read_run(tmp_path / f"{name}.jsonl") for name in "ab")).difference
    assert found is not None
    assert found.operator is not None
    assert (found.kind, found.operator.operator, found.values) == (
        "extra",
        "aten.mm.default",
        ("gradient of weight",),
    )


def test_phases(reference: Path) -> None:
    by_phase: dict[str, list[Operator]] = {}
    for each in read_operators(reference, 0, faults.STEP).operators:
        by_phase.setdefault(each.where.phase, []).append(each)
    assert list(by_phase) == ["forward", "loss", "backward", "gradients", "optimizer"]
    assert by_phase["loss"][-1].operator == "aten.ones_like.default"  # where backward begins
    places = {phase: str(operators[0].where).split(" (")[0] for phase, operators in by_phase.items()}
    assert places == {
        "forward": "forward of module 'emb'",
        "loss": "loss",
        "backward": "backward of the model itself",
        "gradients": "treatment of gradients",
        "optimizer": "optimizer",
    }


def test_the_command(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = faults.train(tmp_path / "other.jsonl", sets("layers.1.attention", "scale", 0.25))
    assert app.main(["locate", str(reference), str(other)]) == 1
    first, a, reads, makes, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 0, step 1: aten.mul.Tensor in the forward of module 'layers.1.attention' (")
    assert first.endswith("result 0 differs (A gives other=0.5, B gives other=0.25)")
    assert a.startswith("  A: aten.mul.Tensor")
    assert reads.startswith("     reads self float32[3, 5, 5] ")
    assert makes.startswith("     makes result 0 float32[3, 5, 5] ")
    assert app.main(["locate", str(reference), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["a"]["arguments"] == ["other=0.5"]
    assert found["difference"]["b"]["inputs"] == found["difference"]["a"]["inputs"]


def test_operators_of_another_step(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strike = sets("layers.1.attention", "scale", 0.25)
    for steps, has in (((2,), "it has those of 2"), ((), "it has none")):
        other = faults.train(tmp_path / "other.jsonl", strike, operators=steps)
        assert app.main(["locate", str(reference), str(other)]) == 2
        assert capsys.readouterr().err == (
            f"graphpasses: the runs part in step 1, of which run B recorded no operators ({has}): record both again "
            "with ParityRecorder(..., operators=[1]) and the step in recorder.operators(...)\n"
        )


def test_a_step_that_is_not_enclosed(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = faults.train(tmp_path / "other.jsonl", after=lambda trainer: trainer.model.norm.bias.data.add_(1))
    assert app.main(["locate", str(reference), str(other)]) == 2
    assert capsys.readouterr().err == (
        "graphpasses: the runs part in step 1, but all operators that they recorded of it are equal: something "
        "differs that recorder.operators() did not enclose, e.g. the optimizer\n"
    )


def test_damaged_files(reference: Path, tmp_path: Path) -> None:
    file = operator_file(faults.train(tmp_path / "run.jsonl"), 0)
    lines = file.read_bytes().splitlines(keepends=True)
    for content, message in (
        (lines[:5], "ends in the midst of step 1: the run was cut short"),
        ([*lines[:5], lines[5][:-9]], "ends in the midst of step 1: the run was cut short"),
        ([*lines[:5], b"{]\n"], "is damaged in line 6: it is not JSON"),
        ([*lines[:3], *lines[4:]], "is damaged in line 3"),
        ([lines[0].replace(b'"version": 4', b'"version": 9'), *lines[1:]], "has format version 9, this"),
        (lines[1:], "holds no operators: its first line is not their header"),
    ):
        file.write_bytes(b"".join(content))
        with pytest.raises(RunFileError) as error:
            read_operators(tmp_path / "run.jsonl", 0, faults.STEP)
        assert str(error.value).startswith(f"'{file}' ")
        if not message.startswith("is damaged in line 3"):
            assert message in str(error.value)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl.operators").write_text("")
    with pytest.raises(RunFileError) as error:
        faults.train(tmp_path / "run.jsonl")
    assert str(error.value) == f"cannot write '{tmp_path}/run.jsonl.operators/rank-0.jsonl': Not a directory"


def test_every_bit_counts(tmp_path: Path) -> None:
    """NaNs of other payloads, and zeros of other signs, go into an operator."""
    model = nn.Linear(1, 1, bias=False)
    values: dict[str, set[str | None]] = {}
    for name, bits in (
        ("zero", 0),
        ("negative zero", -(2**31)),
        ("nan", 0x7FC00000),
        ("other nan", 0x7FC00001),
    ):
        x = torch.tensor([[bits]], dtype=torch.int32).view(torch.float32)
        path = tmp_path / f"{name}.jsonl"
        with ParityRecorder(path, operators=[0]) as recorder, recorder.operators(0, model):
            model(x)
        (call,) = read_operators(path, 0, 0).operators
        values[name] = {value.digest for value in call.inputs}
    assert len({frozenset(each) for each in values.values()}) == 4


def test_operators_are_written_while_the_step_runs_and_no_tensor_is_held() -> None:
    found: list[Operator] = []
    x, held = torch.ones(4), []
    with operators_recorded(nn.Identity(), found.append):
        for _ in range(500):
            x = x + 1
            held.append(weakref.ref(x))
        num_written, num_held = len(found), sum(each() is not None for each in held)
    assert (num_written, len(found)) == (384, 500)
    assert num_held <= 2  # the last one, and what a frame may still have


def test_runs_that_have_one_stem_have_folders_of_their_own() -> None:
    names = ("run", "run.1", "run.2", "run.jsonl")
    assert len({operator_file(name, 0) for name in names}) == len(names)
    assert operator_file("run.1", 0) == operator_file("run.1", 0)
