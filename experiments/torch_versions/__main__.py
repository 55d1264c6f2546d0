"""Command line: ``python -m experiments.torch_versions --help``."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

from experiments.harness.versions import installed_versions
from experiments.torch_versions.record import (
    Record,
    count_tests,
    page,
    parity_summary,
    read_records,
    write_record,
)

ROOT = Path(__file__).parents[2]


def main(
    records: Path = ROOT / "experiments" / "torch_versions" / "records",
    write: Path = ROOT / "docs" / "versions.md",
    run: bool = True,
    tests: Path | None = None,
    parity: bool = True,
) -> int:
    """Runs all tests and `make parity` with the torch of this environment, and writes the page of all versions.

    Exit code 0 if every test passed or was skipped and every comparison was made and is right, else 1.

    Args:
        records: folder that has one file for each version of torch.
        write: the page.
        run: `--no-run` writes the page of what was recorded before.
        tests: a report that pytest wrote with --junitxml in this environment; the tests are not run again.
        parity: `--no-parity` leaves `make parity` out, and the page says so.
    """
    is_well = True
    if run:
        counts, failed = count_tests(tests) if tests else _run_tests()
        found = parity_summary(_run_parity()) if parity else "not run"
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        write_record(Record(installed_versions(), today, counts, failed, found), records)
        is_well = not failed and (not parity or re.fullmatch("0 of .* are wrong", found) is not None)
    write.write_text(page(read_records(records)), encoding="utf-8")
    print(f"written: {write}")
    return int(not is_well)


def _run_tests() -> tuple[dict[str, int], tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        options = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", f"--junitxml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False)
        return count_tests(report)


def _run_parity() -> str:
    """Returns what it printed, and prints it while it runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.parity", "--out", folder]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            output = ""
            for line in process.stdout:
                print(line, end="", flush=True)
                output += line
    return output


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
