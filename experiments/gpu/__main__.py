"""Command line: ``python -m experiments.gpu --help``. Needs torch alone, and the source tree."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.gpu import fusion, hashes, lookups, models, nccl, ranks, recommender, steps, titan, tree, zoo
from experiments.gpu.result import Check, Result, SkippedError
from experiments.harness.versions import installed_versions
from graphpasses.errors import UnsupportedError

CHECKS = (
    Check("captured step against eager FSDP2, one rank", steps.parity),
    Check("the same, with clipping and AdamW in the step", steps.parity_with_optimizer),
    Check("two and four ranks on one device", ranks.ranks_on_one_device),
    Check("NCCL, four ranks on one device", nccl.nccl_on_one_device),
    Check("torchtitan's trainers, two ranks on one device", titan.trainers),
    Check("models that others wrote", models.strangers_models),
    Check("architectures of transformers", zoo.architectures),
    Check("the captured step in a CUDA graph", steps.cuda_graphs),
    Check("exact operators in one kernel", fusion.exact_fusion),
    Check("exact operators of every eighth architecture", zoo.fused_architectures),
    Check("Inductor compiles the graphs", steps.inductor),
    Check("hashes", hashes.hashes),
    Check("canonical reductions' additions", tree.additions_in_tree),
    Check("26 tables, fused", lookups.fused_lookups),
    Check("DLRM of TorchRec, compiled", recommender.recommender),
    Check("cost of a certificate", steps.certificate_cost),
    Check("cost of locate", steps.locate_cost),
)
_MARK = "experiments.gpu: "


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every check in a process of its own, and writes what they saw; 0 if none is WRONG or failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu", description=main.__doc__)
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: cuda if there is one"
    )
    parser.add_argument("--steps", type=int, default=25, help="training steps to compare")
    parser.add_argument("--only", default="", help="checks whose name contains this text")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each check")
    parser.add_argument("--out", type=Path, help="file to write; default: RESULTS.md here, without a GPU runs/gpu.md")
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    device = given.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.steps < 4:
        parser.error("--steps must be at least 4: a control differs in step 3")
    if given.check is not None:
        print(_MARK + json.dumps(_run(CHECKS[given.check], device, given.steps).to_json()), flush=True)
        return 0
    out = given.out or (Path(__file__).parent / "RESULTS.md" if device == "cuda" else Path("runs/gpu.md"))
    out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for index, check in enumerate(CHECKS):
        if given.only in check.name:
            print(f"{check.name} …", flush=True)
            results.append(_in_process(index, device, given.steps, given.timeout))
            print(f"  {results[-1].status} {results[-1].reason}", flush=True)
            out.write_text(_page(results, device, given.steps))
    if not results:
        parser.error(f"no check contains {given.only!r}; there are: {', '.join(each.name for each in CHECKS)}")
    print(f"wrote {out}")
    return int(any(result.status in ("WRONG", "failed") for result in results))


def _run(check: Check, device: str, num_steps: int) -> Result:
    start = time.perf_counter()
    try:
        is_right, found = check.run(device, num_steps)
    except (SkippedError, UnsupportedError) as error:
        return Result(check.name, "skipped", str(error))
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return Result(check.name, "failed", reason, seconds=time.perf_counter() - start)
    return Result(check.name, "ok" if is_right else "WRONG", "", tuple(found), time.perf_counter() - start)


def _in_process(index: int, device: str, num_steps: int, timeout: float) -> Result:
    command = [sys.executable, "-m", "experiments.gpu", "--check", str(index), "--device", device]
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    try:
        done = subprocess.run(
            [*command, "--steps", str(num_steps)],
            cwd=root,
            # The setting with which cuBLAS is deterministic.
            env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(CHECKS[index].name, "failed", f"not done within {timeout:.0f} s")
    marked = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not marked:
        return Result(CHECKS[index].name, "failed", f"the process ended with {done.returncode}")
    return Result.from_json(json.loads(marked[-1].removeprefix(_MARK)))


def _page(results: Sequence[Result], device: str, num_steps: int) -> str:
    lines = [
        "# What was seen on a GPU" if device == "cuda" else "# Not run on a GPU: what a CPU shows of it",
        "",
        "Written by `make gpu` (`python -m experiments.gpu`); [README](README.md) says what each check does.",
        "",
        f"{datetime.date.today()}; {_machine(device)}; {num_steps} steps; Python {platform.python_version()}; "
        + ", ".join(f"{name} {version}" for name, version in installed_versions().items()),
        "",
        "| check | | seconds |",
        "|---|---|---:|",
    ]
    for result in results:
        status = f"{result.status}: {result.reason}" if result.reason else result.status
        lines.append(f"| {result.name} | {_cell(status)} | {result.seconds:.0f} |")
    for result in results:
        if result.found:
            lines += ["", f"## {result.name[0].upper()}{result.name[1:]}", "", "| | |", "|---|---|"]
            lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in result.found]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _machine(device: str) -> str:
    if device == "cuda":
        major, minor, patch = torch.cuda.nccl.version()
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, NCCL {major}.{minor}.{patch}"
    return f"no GPU, {platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    raise SystemExit(main())
