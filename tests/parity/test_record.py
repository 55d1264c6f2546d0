"""Run files: what a recorder writes is read back, whatever happened to the writer."""

import contextlib
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from graphpasses.errors import RunFileError, UnsupportedError
from graphpasses.fsdp.layout import BucketLayout, Layout, LayoutEntry
from graphpasses.graph.pass_report import Hunk, Numerics, PassReport, PipelineReport
from graphpasses.parity import ParityRecorder, gradient_hashes, read_run, weight_hashes
from graphpasses.parity.launch import run_ranks
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.recorded_runs import record

LAYOUT = Layout((BucketLayout("reduce_scatter", (0, 1), "avg", "bfloat16", (LayoutEntry("weight", 6, 3, 0),)),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def test_round_trip(path: Path) -> None:
    topology = {"nodes": 2}
    model = record(path, run="eager", model="linear", seed={"torch": 0}, topology=topology, layouts=LAYOUT)
    run = read_run(path)
    assert run.complete
    assert run.header.torch == torch.__version__
    assert (run.header.run, run.header.model, run.header.world_size) == ("eager", "linear", 1)
    assert (run.header.seed, run.header.topology, run.header.layouts) == ({"torch": 0}, topology, LAYOUT)
    assert [step.step for step in run.steps] == [0, 1, 2]
    assert run.steps[-1].weights == weight_hashes(model)
    assert run.steps[-1].gradients == gradient_hashes(model)


@pytest.mark.parametrize(
    ("loss", "dtype", "bits", "value"),
    [
        (torch.tensor(1.0), "float32", "3f800000", "1.0"),
        (torch.tensor([-0.0]), "float32", "80000000", "-0.0"),
        (torch.tensor(float("nan")), "float32", "7fc00000", "nan"),
        (torch.tensor(1.0).bfloat16(), "bfloat16", "3f80", "1.0"),
        (float("-inf"), "float64", "fff0000000000000", "-inf"),
    ],
)
def test_loss_bits(path: Path, loss: torch.Tensor | float, dtype: str, bits: str, value: str) -> None:
    with ParityRecorder(path) as recorder:
        recorder.record(0, loss, nn.Linear(1, 1))
    found = read_run(path).steps[0].loss
    assert found is not None
    assert (found.dtype, found.bits, found.values) == (dtype, (bits,), (value,))
    json.loads(path.read_text().splitlines()[1], parse_constant=pytest.fail)


def test_a_step_without_loss_and_given_gradients(path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    with ParityRecorder(path) as recorder:
        recorder.record(-1, None, model)
        recorder.record(0, None, model, gradients={"weight": torch.ones(1, 1)})
    before, after = read_run(path).steps
    assert before.loss is None
    assert before.gradients == {"weight": None}
    model.weight.grad = torch.ones(1, 1)
    assert after.gradients == gradient_hashes(model)


def test_a_refused_step_may_be_recorded_again(path: Path) -> None:
    momentum = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with ParityRecorder(path) as recorder:
        with pytest.raises(UnsupportedError, match=r"^cannot record a loss of shape "):
            recorder.record(0, torch.zeros(2), {})
        with pytest.raises(UnsupportedError, match=r"^cannot record 'low' as a loss; give a tensor or a number"):
            recorder.record(0, "low", {})  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=r"^cannot record a list; give a module, or tensors by name"):
            recorder.record(0, None, [momentum])  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=r"^optimizer= needs the module"):
            recorder.record(0, None, {}, optimizer=momentum)
        recorder.record(0, None, {})


def test_what_follows_the_with_block_is_not_lost_without_a_word(path: Path) -> None:
    with ParityRecorder(path) as recorder:
        recorder.record(0, 1.0, {})
    recorder.close()
    for late in (lambda: recorder.record(1, 1.0, {}), lambda: recorder.record_layouts(LAYOUT)):
        with pytest.raises(RunFileError, match=f"'{path}' is closed, and nothing is added to it; record inside the"):
            late()
    assert read_run(path).complete


def test_steps_must_ascend(path: Path) -> None:
    with ParityRecorder(path) as recorder:
        recorder.record(3, None, nn.Linear(1, 1))
        with pytest.raises(RunFileError) as error:
            recorder.record(3, None, nn.Linear(1, 1))
    assert str(error.value) == "step 3 cannot be recorded after step 3"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"run": 3}, "its run is 3, not text"),
        ({"model": nn.ReLU}, "Object of type type is not JSON serializable"),
        ({"topology": {1: "a", "1": "b"}}, "it has '1' twice"),
    ],
)
def test_a_header_that_could_not_be_read_again(path: Path, options: dict[str, Any], reason: str) -> None:
    record(path, run="before")
    with pytest.raises(RunFileError) as error:
        record(path, overwrite=True, **options)
    assert str(error.value) == f"cannot write '{path}': {reason}"
    assert read_run(path).header.run == "before"


def test_a_step_that_could_not_be_read_again(path: Path) -> None:
    with ParityRecorder(path) as recorder:
        recorder.record(0, 1.0, {})
        with pytest.raises(RunFileError) as error:
            recorder.record(0.5, 1.0, {})  # type: ignore[arg-type]
        recorder.close(complete=False)
    assert str(error.value) == f"cannot write '{path}': its step is 0.5, not a number"
    assert [step.step for step in read_run(path).steps] == [0]


def test_an_existing_run_is_kept(path: Path) -> None:
    record(path)
    before = path.read_bytes()
    with pytest.raises(RunFileError) as error:
        record(path)
    assert str(error.value) == f"'{path}' exists already; name another file, or pass overwrite=True to replace it"
    assert path.read_bytes() == before
    record(path, num_steps=1, overwrite=True)
    assert len(read_run(path).steps) == 1


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunFileError) as error:
        ParityRecorder(tmp_path / "no" / "run.jsonl")
    assert str(error.value) == f"cannot write '{tmp_path}/no/run.jsonl': No such file or directory"


def test_a_run_that_raised_is_cut_short(path: Path) -> None:
    recorder = ParityRecorder(path)

    def train() -> None:
        with recorder:
            recorder.record(0, 1.0, nn.Linear(1, 1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    run = read_run(path)
    assert not run.complete
    assert len(run.steps) == 1


def test_a_run_in_progress_can_be_read(path: Path) -> None:
    with ParityRecorder(path) as recorder:
        recorder.record(0, 1.0, nn.Linear(1, 1))
        assert len(read_run(path).steps) == 1


def test_truncation_at_every_byte_leaves_a_prefix(path: Path) -> None:
    record(path, num_steps=2, layouts=LAYOUT, model="größer")
    whole, steps = path.read_bytes(), read_run(path).steps
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        num_whole_lines = whole[:size].count(b"\n")
        if num_whole_lines == 0:
            with pytest.raises(RunFileError, match=r"is empty: the run|is cut in its first line: the run"):
                read_run(path)
            continue
        run = read_run(path)
        assert not run.complete
        assert run.steps == steps[: num_whole_lines - 1]


def test_kill_9_leaves_whole_steps(path: Path) -> None:
    writer = f"""
import torch
from graphpasses.parity import ParityRecorder
recorder = ParityRecorder({str(path)!r})
for step in range(10**9):
    recorder.record(step, float(step), torch.nn.Linear(4, 4))
"""
    process = subprocess.Popen([sys.executable, "-c", writer], cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or path.read_bytes().count(b"\n") < 20:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    run = read_run(path)
    assert not run.complete
    assert [step.step for step in run.steps] == list(range(len(run.steps)))
    assert len(run.steps) >= 19


def record_until_the_disk_is_full(path: Path) -> tuple[int, str]:
    """Runs on every rank; returns how many steps it recorded, and what ended it."""
    with ParityRecorder(path) as recorder:
        if torch.distributed.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        for step in range(100):
            try:
                recorder.record(step, 1.0, {"weight": torch.ones(1)})
            except RunFileError as error:
                recorder.close(complete=False)
                return step, str(error)
    raise AssertionError


@pytest.mark.multiprocess
def test_a_full_disk_ends_all_ranks(path: Path) -> None:
    (num_steps, reason), other = run_ranks(record_until_the_disk_is_full, 2, path)
    assert other == (num_steps, reason)
    assert re.fullmatch(rf"cannot write '{path}': only \d+ of \d+ bytes fit on the disk", reason)
    run = read_run(path)
    assert (len(run.steps), run.complete) == (num_steps, False)


class Counting:
    """A pass's report that counts how often it is made to JSON."""

    num_calls = 0

    def to_json(self) -> dict[str, object]:
        self.num_calls += 1
        return {}


def record_what_json_cannot_take(path: Path) -> tuple[int, list[str]]:
    """Runs on every rank; returns how often it made JSON of a report, and what JSON could not take."""
    report, reasons = Counting(), []
    for step, layouts in ((numpy.int64(1), None), (1, nn.Linear(1, 1))):
        with contextlib.ExitStack() as closing:
            recorder = ParityRecorder(path, overwrite=True)
            closing.callback(recorder.close, complete=False)
            recorder.record_passes({"step": PipelineReport((report,))})
            recorder.record(0, 1.0, {})
            if layouts is not None:
                recorder.record_layouts(layouts)
            with pytest.raises(RunFileError) as error:
                recorder.record(step, 1.0, {})
            reasons.append(str(error.value))
    return report.num_calls, reasons


@pytest.mark.multiprocess
def test_what_json_cannot_take_ends_all_ranks_and_rank_0_alone_makes_it(path: Path) -> None:
    (num_calls, reasons), (other_calls, other_reasons) = run_ranks(record_what_json_cannot_take, 2, path)
    assert (num_calls, other_calls) == (2, 0)
    assert reasons == other_reasons
    assert reasons == [
        f"cannot write '{path}': Object of type int64 is not JSON serializable",
        f"cannot write '{path}': 'Linear' object has no attribute 'named'",
    ]


def record_other_things(path: Path) -> list[str]:
    """Records what differs between two ranks, and in the end what does not."""
    rank = torch.distributed.get_rank()
    loss = torch.tensor(1.0)
    reasons = []
    with ParityRecorder(path) as recorder:
        for step, its in ((0, None if rank else loss), (0, loss.double() if rank else loss), (rank, loss), (2, loss)):
            try:
                recorder.record(step, its, {})
            except RunFileError as error:
                reasons.append(str(error).partition(": all ranks")[0])
    return reasons


@pytest.mark.multiprocess
def test_ranks_that_record_other_things_end_together(path: Path) -> None:
    assert run_ranks(record_other_things, 2, path) == 2 * [
        [
            "ranks 0 and 1 record other things (step 0 with a loss of float32; step 0 with no loss)",
            "ranks 0 and 1 record other things (step 0 with a loss of float32; step 0 with a loss of float64)",
            "ranks 0 and 1 record other things (step 0 with a loss of float32; step 1 with a loss of float32)",
        ]
    ]
    assert [step.step for step in read_run(path).steps] == [2]


def test_a_recorder_made_before_its_ranks(path: Path) -> None:
    early = ParityRecorder(path)

    def on_rank() -> None:
        with pytest.raises(
            RunFileError, match=r"was made on 1 ranks, and 2 record: make it after init_process_group"
        ):
            early.record(0, 1.0, {})

    run_cluster(on_rank, Topology(2, gpus_per_node=2))
    early.record(0, 1.0, {})
    early.close()
    assert read_run(path).complete


def record_stages(path: Path) -> None:
    """Each of two ranks has a stage of its own, and both have the same buffer."""
    rank = torch.distributed.get_rank()
    group = [torch.distributed.new_group([each]) for each in range(2)][rank]
    with ParityRecorder(path, group=group) as recorder:
        tensors = {f"layers.{rank}.weight": torch.full((2,), float(rank)), "places": torch.ones(3)}
        recorder.record(1, torch.tensor(float(rank)), tensors)


@pytest.mark.multiprocess
def test_ranks_of_a_pipeline_record_the_tensors_of_all_stages(path: Path) -> None:
    run_ranks(record_stages, 2, path)
    (step,) = read_run(path).steps
    assert sorted(step.weights) == ["layers.0.weight", "layers.1.weight", "places"]
    assert step.weights["layers.0.weight"] != step.weights["layers.1.weight"]
    assert step.loss is not None
    assert step.loss.values == ("0.0", "1.0")


def test_a_simulated_cluster_is_recorded(path: Path) -> None:
    topology = Topology(4, gpus_per_node=2, mode="cross_nic")
    run_cluster(record, topology, path)
    assert read_run(path).header.topology == json.loads(json.dumps(asdict(topology)))
    run_cluster(functools.partial(record, topology={"name": "mine"}, overwrite=True), topology, path)
    assert read_run(path).header.topology == {"name": "mine"}


# ---- what passes did ----------------------------------------------------------------------------------


def report_of(num_rewrites: int) -> PipelineReport:
    counts = {"all_gather_into_tensor": 2}
    hunk = Hunk(("- a = aten.relu.default(x)",), ("+ b = aten.sin.default(x)",), 2)
    report = PassReport(
        "fuse-size-tensors", Numerics.BITWISE, num_rewrites, (5, 4), (counts, counts), 0.5, ("left",), (hunk,), 1
    )
    return PipelineReport((report,), proof="3 values proved equal in bits, 0 not proved; ms: 1.0")


def test_what_passes_did_is_read_back(path: Path) -> None:
    with ParityRecorder(path) as recorder:
        recorder.record_passes(report_of(1))
        recorder.record(0, 1.0, nn.Linear(1, 1))
        recorder.record_passes({"graph 0, joint": report_of(2)})  # compiled at the first step
    run = read_run(path)
    assert run.complete
    assert len(run.steps) == 1
    assert run.passes == {"graph 0, joint": report_of(2)}


def test_layouts_that_are_known_later(path: Path) -> None:
    with ParityRecorder(path) as recorder:
        recorder.record(0, 1.0, nn.Linear(1, 1))
        recorder.record_layouts(LAYOUT)
    assert read_run(path).header.layouts == LAYOUT
    path.write_text(path.read_text().replace('"entries"', '"parameters"'))
    with pytest.raises(RunFileError, match="is damaged in line 3: it has no 'entries'"):
        read_run(path)


def test_a_run_without_passes_has_none(path: Path) -> None:
    record(path)
    assert read_run(path).passes == {}


def test_damaged_passes_are_named(path: Path) -> None:
    with ParityRecorder(path) as recorder:
        recorder.record_passes(report_of(1))
    text = path.read_text()
    for old, new, reason in (
        ('"bitwise"', '"roughly"', "'roughly' is not a valid Numerics"),
        ('"num_rewrites"', '"rewrites"', "it has no 'num_rewrites'"),
        ('{"step": [', '[["step", ', "a field is of the wrong kind"),
    ):
        damaged = text.replace(old, new)
        if old.startswith("{"):
            damaged = damaged.replace(']}, "proofs"', ']], "proofs"')
        path.write_text(damaged)
        with pytest.raises(RunFileError, match=f"is damaged in line 2: {re.escape(reason)}"):
            read_run(path)
