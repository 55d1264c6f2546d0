"""What one environment's runs showed, as a file has it, and the page that shows all."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

__all__ = [
    "Record",
    "count_tests",
    "page",
    "parity_summary",
    "read_records",
    "write_record",
]


@dataclass(frozen=True)
class Record:
    """What was run with one version of torch.

    Args:
        versions: by package, its version; packages that are not installed are not there.
        date: of the run, ``YYYY-MM-DD``.
        tests: how many tests ``passed``, were ``skipped`` and ``failed``.
        failed: the names of those that failed.
        parity: the last line of ``make parity``'s table, or why there is none.
    """

    versions: dict[str, str]
    date: str
    tests: dict[str, int]
    failed: tuple[str, ...]
    parity: str

    @property
    def release(self) -> str:
        """The first two numbers of torch's version."""
        return ".".join(self.versions["torch"].split(".")[:2])


def count_tests(path: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Returns how many tests passed, were skipped and failed, and the names of those that failed.

    Args:
        path: of a report that pytest wrote with ``--junitxml``.
    """
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    failed = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
        if kind == "failed":
            failed.append(f"{case.get('classname')}.{case.get('name')}")
    return counts, tuple(failed)


def parity_summary(output: str) -> str:
    """Returns what ``make parity`` says in the end.

    Args:
        output: of it.

    Example:
        >>> parity_summary("...\\n0 of 41 comparisons are wrong, 1 could not be made; 474 s\\n")
        '0 of 41 comparisons are wrong, 1 could not be made'
    """
    found = re.findall(r"\d+ of \d+ comparisons are wrong(?:, \d+ could not be made)?", output)
    return found[-1] if found else "it did not end"


def read_records(folder: Path) -> list[Record]:
    """Returns what was recorded, by version of torch.

    Args:
        folder: of files that hold one record each.
    """
    records = []
    for path in folder.glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        records.append(Record(**{**data, "failed": tuple(data["failed"])}))
    return sorted(records, key=lambda record: [int(part) for part in record.release.split(".")])


def write_record(record: Record, folder: Path) -> None:
    """Writes a record where :func:`read_records` finds it, in the place of an earlier one of this torch."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(record), indent=1) + "\n"
    (folder / f"torch-{record.release}.json").write_text(text, encoding="utf-8")


def page(records: list[Record]) -> str:
    """Returns the page of the documentation.

    Args:
        records: of all versions.
    """
    lines = [
        "# Versions",
        "",
        "This page was written by `make versions`, `make versions TORCH=2.14` and `make versions TORCH=2.15`: each",
        "runs all tests and `make parity` with what its lock pins, and enters what it saw. Tests of what a version",
        "lacks are skipped: FBGEMM 1.9.0 does not load with torch 2.15, so nothing of TorchRec runs there.",
        "",
        "| torch | torchtitan | TorchRec | FBGEMM | tests passed | skipped | failed | `make parity` | run on |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    if not records:
        lines = [*lines[:-2], "No whole run is recorded yet."]
    for record in records:
        v, t = record.versions, record.tests
        fbgemm = v.get("fbgemm-gpu", v.get("fbgemm-gpu-cpu", "none"))
        cells = (v["torch"], v.get("torchtitan", "none"), v.get("torchrec", "none"), fbgemm)
        counts = (str(t["passed"]), str(t["skipped"]), str(t["failed"]))
        lines.append(f"| {' | '.join((*cells, *counts, record.parity, record.date))} |")
    for record in records:
        if record.failed:
            lines += [
                "",
                f"Failed with torch {record.release}:",
                "",
                *(f"- `{name}`" for name in record.failed),
            ]
    return "\n".join(lines) + "\n"
