"""NCCL itself, of four ranks on one GPU: does it add in the order that ``graphpasses.simulate`` takes from its log?

On a CPU the ranks' backend is ``nccl_sim``, which shows the check itself at work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port

from experiments.gpu.result import SkippedError
from graphpasses.errors import GraphPassesError
from graphpasses.simulate import Topology, configure, run_cluster, topology_from_log
from graphpasses.simulate.rings import rings
from graphpasses.simulate.trees import trees

__all__ = ["nccl_on_one_device"]

_NODES = (4, 2, 1)  # GPUs of a node, of four ranks
_NUM_RANKS = 4
_SETTINGS = {
    "as it chooses": {},
    "ring, Simple": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"},
    "ring, LL": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"},
    "ring, LL128": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128"},
    "tree": {"NCCL_ALGO": "allreduce:tree;reducescatter:ring", "NCCL_PROTO": "Simple"},
}
_LOGS = Path("runs/gpu/nccl")
_TIMEOUT = 120.0  # seconds; ranks that wait for each other take turns on the device


def nccl_on_one_device(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Reduce-scatters and all-reduces of three sizes, sums and means, bfloat16 and float32.

    The control adds along NCCL's rings backwards, and its trees with the ranks in reverse. ``num_steps`` is not used.
    """
    if device == "cuda" and torch.cuda.nccl.version() < (2, 30):
        raise SkippedError("several ranks on one GPU need NCCL 2.30, which torch 2.15 brings")
    settings = _SETTINGS if device == "cuda" else {"nccl_sim": {}}
    cases = list(product(_NODES, settings.items()))
    names = [f"{_NUM_RANKS // num_local} × {num_local}, {name}" for num_local, (name, _) in cases]
    folders = [_LOGS / name.replace("×", "x").replace(",", "").replace(" ", "-") for name in names]
    with ThreadPoolExecutor(3) as pool:
        launched = [
            pool.submit(_launch, device, num_local, environment, folder)
            for (num_local, (_, environment)), folder in zip(cases, folders, strict=True)
        ]
    rows = [
        _judge(device, num_local, folder, each)
        for (num_local, _), folder, each in zip(cases, folders, launched, strict=True)
    ]
    return all(is_right for is_right, _ in rows), [(name, text) for name, (_, text) in zip(names, rows, strict=True)]


def _judge(device: str, num_local: int, folder: Path, launched: Future[None]) -> tuple[bool, str]:
    try:
        launched.result()
        topology = Topology(_NUM_RANKS, num_local)
        if device == "cuda":
            log = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
            topology = topology_from_log(log, gpus_per_node=num_local, algorithm="auto", protocol="auto")
        ours = run_cluster(reduce_all, topology, "cpu")
        last, backwards = _NUM_RANKS - 1, tuple(ring[::-1] for ring in rings(topology))
        mirrored = tuple(
            tuple(tuple(last - child for child in children) for children in tree[::-1])
            for tree in (trees(topology) if topology.num_nodes == 1 else topology.explicit_trees)
        )
        turned = replace(topology, mode="explicit", explicit_rings=backwards, explicit_trees=mirrored)
        control = run_cluster(reduce_all, turned, "cpu")
    except (GraphPassesError, subprocess.SubprocessError) as error:
        return False, f"{type(error).__name__}: {error}"
    theirs = [torch.load(folder / f"{rank}.pt") for rank in range(_NUM_RANKS)]
    different = [key for key in theirs[0] if _num_different(theirs, ours, key)]
    num_turned = sum(_num_different(theirs, control, key) > 0 for key in theirs[0])
    text = f"{len(theirs[0]) - len(different)} of {len(theirs[0])} reductions equal, control {num_turned} different"
    if different:
        text += "; " + ", ".join(f"{key}: {_num_different(theirs, ours, key)} elements" for key in different[:3])
    return not different and num_turned > 0, text


def _num_different(theirs: list[dict[str, Tensor]], ours: list[dict[str, Tensor]], key: str) -> int:
    return sum(int((a[key] != b[key]).sum()) for a, b in zip(theirs, ours, strict=True))


def _launch(device: str, num_local: int, environment: dict[str, str], folder: Path) -> None:
    """Starts a process for each rank; each is on a host of its own name, if NCCL is to see several nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    port = str(get_free_port())
    ranks = []
    for rank in range(_NUM_RANKS):
        own = {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_HOSTID": f"node{rank // num_local}",
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING,COLL",
            "NCCL_DEBUG_FILE": str(folder / f"{rank}.log"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": str(_NUM_RANKS),
        }
        command = [sys.executable, "-m", "experiments.gpu.nccl", device, str(num_local), str(folder)]
        ranks.append(subprocess.Popen(command, env={**os.environ, **environment, **own}))
    try:
        for process in ranks:
            if process.wait(_TIMEOUT):
                raise subprocess.CalledProcessError(process.returncode, process.args)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def reduce_all(device: str) -> dict[str, Tensor]:
    """Returns what this rank gets of each reduction, on the CPU; the numbers that it gives are its own."""
    results = {}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for dtype, num in product((torch.bfloat16, torch.float32), (600, 40_000, 1_000_000)):
        size = num * dist.get_world_size()
        scales = 2.0 ** torch.randint(-6, 6, (size,), generator=generator)
        given = (torch.randn(size, generator=generator) * scales).to(device, dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            name = f"{op.name.lower()} of {num:,} {str(dtype).removeprefix('torch.')}"
            shard, whole = given.new_empty(num), given.clone()
            dist.reduce_scatter_single(shard, given, op)
            dist.all_reduce(whole, op)
            results |= {f"reduce-scatter, {name}": shard.cpu(), f"all-reduce, {name}": whole.cpu()}
    return results


def _rank(device: str, num_local: int, folder: Path) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        configure(Topology(_NUM_RANKS, num_local))
    dist.init_process_group("nccl" if device == "cuda" else "nccl_sim")
    torch.save(reduce_all(device), folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
