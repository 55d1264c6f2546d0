"""The page of what passes with each torch says what was seen, failures by name."""

from __future__ import annotations

from pathlib import Path

from experiments.torch_versions.record import (
    Record,
    count_tests,
    page,
    parity_summary,
    read_records,
    write_record,
)

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one" />
<testcase classname="tests.test_a" name="test_two"><skipped message="no CUDA device" /></testcase>
<testcase classname="tests.test_a" name="test_three[x]"><failure message="AssertionError" /></testcase>
<testcase classname="tests.test_b" name="test_four"><error message="fixture" /></testcase>
</testsuite></testsuites>"""

OLD = Record(
    versions={"torch": "2.9.1", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"},
    date="2026-11-01",
    tests={"passed": 3, "skipped": 1, "failed": 0},
    failed=(),
    parity="0 of 41 comparisons are wrong",
)
NEW = Record(
    versions={"torch": "2.15.0", "torchtitan": "0.3.0"},
    date="2026-11-02",
    tests={"passed": 1, "skipped": 1, "failed": 1},
    failed=("tests.test_a.test_three[x]",),
    parity="it did not end",
)


def test_tests_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(REPORT)
    assert count_tests(path) == (
        {"passed": 1, "skipped": 1, "failed": 2},
        ("tests.test_a.test_three[x]", "tests.test_b.test_four"),
    )


def test_a_parity_run_that_did_not_end_is_no_success() -> None:
    assert parity_summary("41 cases\n1 of 9 comparisons are wrong; 5 s") == "1 of 9 comparisons are wrong"
    assert parity_summary("Traceback") == "it did not end"


def test_records_are_kept_by_version(tmp_path: Path) -> None:
    for record in (NEW, OLD, NEW):
        write_record(record, tmp_path)
    assert read_records(tmp_path) == [OLD, NEW]


def test_page() -> None:
    lines = page([OLD, NEW]).splitlines()
    start = lines.index("|---|---|---|---|---|---|---|---|---|") + 1
    assert lines[start:] == [
        "| 2.9.1 | none | 1.8.0 | 1.8.0 | 3 | 1 | 0 | 0 of 41 comparisons are wrong | 2026-11-01 |",
        "| 2.15.0 | 0.3.0 | none | none | 1 | 1 | 1 | it did not end | 2026-11-02 |",
        "",
        "Failed with torch 2.15:",
        "",
        "- `tests.test_a.test_three[x]`",
    ]


def test_page_without_records() -> None:
    assert page([]).splitlines()[-2:] == ["", "No whole run is recorded yet."]


def test_the_page_in_the_docs_is_what_was_recorded() -> None:
    root = Path(__file__).parents[2]
    records = read_records(root / "experiments" / "torch_versions" / "records")
    assert (root / "docs" / "versions.md").read_text() == page(records)
