"""Command line: ``python -m experiments.torch_versions --help``."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

from experiments.torch_versions.record import (
    Record,
    count_tests,
    page,
    parity_summary,
    read_records,
    versions_here,
    write_record,
)

ROOT = Path(__file__).parents[2]


def main(
    records: Path = ROOT / "experiments" / "torch_versions" / "records",
    write: Path = ROOT / "docs" / "versions.md",
    run: bool = True,
) -> int:
    """Runs all tests and `make parity` with the torch of this environment, and writes the page of all versions.

    Exit code 0 if every test passed or was skipped and no comparison is wrong, else 1.

    Args:
        records: folder that has one file for each version of torch.
        write: the page.
        run: `--no-run` writes the page of what was recorded before.
    """
    record = _run() if run else None
    if record is not None:
        write_record(record, records)
    write.write_text(page(read_records(records)), encoding="utf-8")
    print(f"written: {write}")
    is_well = record is None or (not record.failed and record.parity.startswith("0 of "))
    return int(not is_well)


def _run() -> Record:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        options = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", f"--junitxml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False)
        tests, failed = count_tests(report)
        command = [sys.executable, "-m", "experiments.parity", "--out", f"{folder}/parity"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            output = ""
            for line in process.stdout:
                print(line, end="", flush=True)
                output += line
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return Record(versions_here(), today, tests, failed, parity_summary(output))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
