"""Train one model on a simulated cluster twice: with eager FSDP2, and as a captured and rewritten step."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fsdp2 import read_groups
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.errors import TaskError, UnsupportedError
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.layout import Layout, eager_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import CapturedStep
from graphpasses.graph.pass_report import PipelineReport
from graphpasses.graph.returned import loss_of
from graphpasses.parity.record import ChosenOperators, ParityRecorder
from graphpasses.passes import default_pipeline
from graphpasses.passes.runner import Pipeline
from graphpasses.simulate.cluster import check_memory, run_cluster, share, step_for_rank
from graphpasses.simulate.rings import Topology

Rewrite = Callable[[CapturedStep, BucketPlan, Layout], CapturedStep]
"""Makes of the captured step the one that runs, given eager's buckets and their layout."""

_OPTIONAL = ("optimizer", "name", "seed", "num_replicas", "pipeline")
_REQUIRED = ("model", "shard", "loss_fn", "batch")
_adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        model: builds the model; called on every rank after the same seed.
        shard: shards it in place with ``fully_shard`` on a mesh of all ranks, as for eager training; its axis is
            ``"shard"``.
        loss_fn: called as ``loss_fn(model, *batch)``; returns the rank's scalar loss, or that and other values, as
            :func:`graphpasses.capture_train_step` takes them.
        batch: called with the step and the rank; returns the arguments of ``loss_fn`` after the model, in a tuple,
            of the same shapes for every step and rank.
        optimizer: given the trainable parameters (default: AdamW with a learning rate of 1e-3).
        name: of the model, for run files.
        seed: set before the model is built.
        num_replicas: with more than one (HSDP) the mesh has the axes ``"replicate"``, of this size, and ``"shard"``.
        pipeline: called with eager's buckets and their layout; returns the passes that rewrite the captured step
            (default: :func:`graphpasses.default_pipeline`, whose result must have that layout).
    """

    model: Callable[[], nn.Module]
    shard: Callable[[nn.Module, DeviceMesh], object]
    loss_fn: Callable[..., Any]
    batch: Callable[[int, int], tuple[Any, ...]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _adamw
    name: str = ""
    seed: int = 0
    num_replicas: int = 1
    pipeline: Callable[[BucketPlan, Layout], Pipeline] = lambda plan, layout: default_pipeline(
        plan, expected_layout=layout
    )


def load_task(source: str) -> Task:
    """Reads a task from a Python file or module that defines what a :class:`Task` has; raises where it cannot."""
    path = Path(source)
    try:
        if path.suffix == ".py":
            # Python's cache of compiled files does not see a change within a second to as many bytes.
            module = sys.modules[path.stem] = ModuleType(path.stem)
            module.__file__ = str(path.absolute())
            code = Path(module.__file__).read_bytes()
            exec(compile(code, module.__file__, "exec", dont_inherit=True), vars(module))
        elif all(map(str.isidentifier, source.split("."))):
            module = importlib.import_module(source)
        else:
            raise ImportError("it is neither a .py file nor the name of a module")
    except (ImportError, OSError, SyntaxError) as error:
        raise TaskError(f"cannot import '{source}': {error}") from error
    except SystemExit as error:
        raise TaskError(
            f"'{source}' ends the program when it is imported, by sys.exit({error.code!r}); put what it runs as a "
            'script under if __name__ == "__main__"'
        ) from error
    if missing := [name for name in _REQUIRED if not callable(getattr(module, name, None))]:
        raise TaskError(
            f"'{source}' does not define {', '.join(f'{name}()' for name in missing)}; a task has model(), "
            "shard(model, mesh), loss_fn(model, *batch) and batch(step, rank)"
        )
    options = {name: getattr(module, name) for name in _OPTIONAL if hasattr(module, name)}
    return Task(*(getattr(module, name) for name in _REQUIRED), **{"name": path.stem, **options})


def train_eager(
    task: Task,
    topology: Topology,
    num_steps: int,
    path: Path,
    *,
    done: Callable[[int], object] | None = None,
    operators: ChosenOperators = (),
) -> None:
    """Trains with eager FSDP2 on a simulated cluster, and records every step.

    Args:
        task: what to train.
        topology: the cluster.
        num_steps: optimizer steps.
        path: run file, replaced if it exists.
        done: called after each step with the number of steps done.
        operators: of which steps to record the operators, see :class:`ParityRecorder`.

    Raises:
        ClusterError: a rank failed; see :func:`run_cluster`.
        TaskError: the replicas do not divide the ranks.

    :func:`train_graph` has an example.
    """

    def make(mesh: DeviceMesh) -> _Made:
        model = _build(task)
        task.shard(model, mesh)
        layout = _checked(model)[1] if dist.get_rank() == 0 else None

        def step(*batch: Any) -> Tensor:
            loss: Tensor = loss_of(task.loss_fn(model, *batch))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        return model, step, layout, None

    _train(task, topology, "eager FSDP2", make, num_steps, path, done, operators)


def train_graph(
    task: Task,
    topology: Topology,
    num_steps: int,
    path: Path,
    *,
    rewrite: Rewrite | None = None,
    sharding: Literal["fully_shard", "simple_fsdp"] = "fully_shard",
    run: str = "graph",
    done: Callable[[int], object] | None = None,
    operators: ChosenOperators = (),
) -> None:
    """Trains as :func:`train_eager`, but with the captured and rewritten step.

    The step is captured and rewritten once for all ranks whose shards have the same shapes.

    Args:
        task: what to train; it, ``topology``, ``num_steps``, ``path``, ``done``, ``operators`` and errors are as for
            :func:`train_eager`.
        rewrite: makes of the captured step the one that runs (default: the task's pipeline).
        sharding: of the captured model: the task's own, or SimpleFSDP's, which leaves it to the passes to bring the
            gradients into eager's order.
        run: name of the run.

    Example:
        >>> import tempfile
        >>> from torch.distributed.fsdp import fully_shard
        >>> task = Task(
        ...     model=lambda: nn.Linear(4, 4),
        ...     shard=lambda model, mesh: fully_shard(model, mesh=mesh),
        ...     loss_fn=lambda model, x: model(x).sum(),
        ...     batch=lambda step, rank: (torch.full((2, 4), float(rank)),),
        ... )
        >>> paths = [Path(tempfile.mkdtemp()) / name for name in ("eager.jsonl", "graph.jsonl")]
        >>> for train, path in zip((train_eager, train_graph), paths):
        ...     train(task, Topology(2, gpus_per_node=2), num_steps=3, path=path)
        >>> graphpasses.compare_runs(*map(graphpasses.read_run, paths)).verdict
        'equal'
    """

    def rewritten(captured: CapturedStep, plan: BucketPlan, layout: Layout) -> CapturedStep:
        return task.pipeline(plan, layout).run(captured, graph_diff=True)

    def make(mesh: DeviceMesh) -> _Made:
        model = _build(task)
        task.shard(model, mesh)
        plan, eager, policies = _checked(model)
        if sharding == "simple_fsdp":
            model = _simply_sharded(_build(task), mesh, policies)
        steps: dict[object, CapturedStep] = share(dict)
        shapes = tuple(local_part(parameter).shape for parameter in model.parameters())
        if shapes not in steps:
            # One rank captures for all, and cannot run an eager step alone.
            batch = task.batch(0, dist.get_rank())
            captured = capture_train_step(task.loss_fn, model, *batch, check=False)
            steps[shapes] = (rewrite or rewritten)(captured, plan, eager)
        step = step_for_rank(steps[shapes], model)
        layout = graph_layout(step) if dist.get_rank() == 0 else None
        return model, step, layout, steps[shapes].report

    _train(task, topology, run, make, num_steps, path, done, operators)


_Policies = frozenset[tuple[torch.dtype, torch.dtype]]
"""The dtypes in which a model computes and reduces, each pair once."""


def _checked(model: nn.Module) -> tuple[BucketPlan, Layout, _Policies]:
    """Returns the buckets of eager FSDP2, their layout, and its dtypes; raises where memory does not suffice."""
    plan = BucketPlan.from_fully_shard(model)
    policies = frozenset(
        (dtype, group.reduce_dtype) for group in read_groups(model).values() for dtype in group.param_dtypes
    )
    widest = max((param_dtype for param_dtype, _ in policies), key=lambda dtype: dtype.itemsize)
    check_memory(model, plan, dist.get_world_size(), widest)
    return plan, eager_layout(model), policies


def _simply_sharded(model: nn.Module, mesh: DeviceMesh, policies: _Policies) -> nn.Module:
    if len(policies) > 1:
        raise UnsupportedError(
            "expected fully_shard with one mixed-precision policy for all modules, found "
            f"{len(policies)}: {', '.join(sorted(map(str, policies)))}"
        )
    ((param_dtype, reduce_dtype),) = policies
    return simple_fsdp(model, mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def _mesh(task: Task) -> DeviceMesh:
    num_ranks = dist.get_world_size()
    if task.num_replicas == 1:
        return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("shard",))
    shape = (task.num_replicas, num_ranks // task.num_replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _check_replicas(task: Task, topology: Topology) -> None:
    if type(task.num_replicas) is not int:
        raise TaskError(f"task {task.name!r} has num_replicas = {task.num_replicas!r}, which is not a number")
    if not 1 <= task.num_replicas <= topology.num_ranks or topology.num_ranks % task.num_replicas:
        raise TaskError(
            f"task {task.name!r} has num_replicas = {task.num_replicas}, which does not divide the "
            f"{topology.num_ranks} ranks of the cluster"
        )


def _build(task: Task) -> nn.Module:
    torch.manual_seed(task.seed)
    return task.model()


_Made = tuple[nn.Module, Callable[..., Tensor], Layout | None, PipelineReport | None]
"""A model, its step, on the first rank its layout, and what passes did."""


def _train(
    task: Task,
    topology: Topology,
    run: str,
    make: Callable[[DeviceMesh], _Made],
    num_steps: int,
    path: Path,
    done: Callable[[int], object] | None,
    operators: ChosenOperators,
) -> None:
    _check_replicas(task, topology)

    def play() -> None:
        rank = dist.get_rank()
        model, step, layout, passes = make(_mesh(task))
        optimizer = task.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        with ParityRecorder(
            path,
            run=run,
            model=task.name,
            seed=task.seed,
            layouts=layout,
            overwrite=True,
            per_rank=[name for name, _ in model.named_buffers()],  # as BatchNorm's running statistics
            operators=operators,
        ) as recorder:
            if passes is not None:
                recorder.record_passes(passes)
            for index in range(num_steps):
                batch = task.batch(index, rank)
                if not isinstance(batch, (tuple, list)):
                    raise TaskError(
                        f"batch() of task {task.name!r} returns a {type(batch).__name__}; return the arguments of "
                        "loss_fn after the model, in a tuple, as (x,)"
                    )
                with recorder.operators(index, model, batch):
                    loss = loss_of(step(*batch))
                    optimizer.step()
                recorder.record(index, loss, model)
                optimizer.zero_grad()
                if done is not None and rank == 0:
                    done(index + 1)

    run_cluster(play, topology)
