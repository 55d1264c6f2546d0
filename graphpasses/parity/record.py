"""Writing a training run's hashes to a file while it trains."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.group_ranks import gathered, rank_of_world
from graphpasses.errors import GraphPassesError, RunFileError, UnsupportedError
from graphpasses.fsdp.layout import Layout
from graphpasses.graph.pass_report import PipelineReport
from graphpasses.identity import unwrapped_name
from graphpasses.parity import run_file
from graphpasses.parity.hashing import named_gradients, named_optimizer_state, named_weights, tensor_hashes
from graphpasses.parity.record_operators import OperatorFile
from graphpasses.state.optimizers import Optimizers

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

ChosenOperators = Collection[int] | Mapping[int, Collection[int]]
"""Steps whose operators are recorded; by step, positions of operators whose tensors are kept whole, too."""


class ParityRecorder:
    """Records the loss, the weights and the gradients of every step of a run, as hashes.

    All ranks make one, record the same steps and take part in hashing; rank 0 writes. Each line is one write,
    flushed to the disk, so that a killed run keeps the steps that it recorded. Leaving the ``with`` block in
    order marks the run as complete; leaving it by an exception does not.

    Args:
        path: file to write.
        run: name of the run.
        model: description of the model.
        seed: seed, or named seeds; runs of different seeds are not compared.
        topology: description of the cluster; anything that JSON takes (default: the simulated one, if it is one).
        layouts: bucket layouts of the reductions; with them a comparison shows which entries moved.
        overwrite: whether to replace a file that exists.
        per_rank: names of tensors of which each rank holds its own,
            see :func:`graphpasses.parity.tensor_hashes`.
        group: the ranks that have the same tensors; with pipeline parallelism those of one stage (default: all).
            Every rank gives its own, and rank 0 writes the tensors of all groups.
        operators: numbers of steps whose operators to record, too, see :meth:`operators`; or, by step, positions of
            operators whose tensors to write to ``rank-N.pt`` beside.

    Raises:
        RunFileError: on all ranks; the file exists and ``overwrite`` is False, or it cannot be written.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> with ParityRecorder(Path(tempfile.mkdtemp()) / "eager.jsonl", seed=0, operators=[1]) as recorder:
        ...     for step in range(3):
        ...         with recorder.operators(step, model):
        ...             loss = model(torch.ones(4, 2)).sum()
        ...             loss.backward()
        ...             optimizer.step()
        ...         recorder.record(step, loss, model)
        ...         optimizer.zero_grad()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run: str = "",
        model: str = "",
        seed: int | Mapping[str, int] | None = None,
        topology: object = None,
        layouts: Layout | None = None,
        overwrite: bool = False,
        per_rank: Collection[str] = (),
        operators: ChosenOperators = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._operators = operators if isinstance(operators, Mapping) else dict.fromkeys(operators, ())
        self._path = Path(path)
        self._group = group
        self._per_rank = frozenset(map(unwrapped_name, per_rank))
        self._file: int | None = None
        self._is_closed = False
        self._failure: str | None = None
        self._last_step: int | None = None
        self._num_steps = 0
        self._rank, self._world_size = rank_of_world()
        # A group of nccl_sim or of run_cluster has one.
        if topology is None and dist.is_available() and dist.is_initialized():
            simulated = getattr(dist.group.WORLD, "topology", None)
            topology = None if simulated is None else asdict(simulated)
        named = layouts and layouts.named(unwrapped_name)
        header = run_file.RunHeader(str(torch.__version__), self._world_size, run, model, seed, topology, named)
        try:
            line = run_file.header_line(header)  # on all ranks, so that all raise what cannot be read again
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFileError(f"cannot write '{path}': {error}") from None
        self._raise_together(self._open(line, overwrite) if self._rank == 0 else None)
        self._operator_file = OperatorFile(self._path, self._rank, self._world_size)
        self._operator_file.remove()  # of an earlier run

    @contextmanager
    def operators(self, step: int, model: nn.Module, batch: Collection[Any] = ()) -> Iterator[None]:
        """Records what goes into and comes out of every operator of a block, as hashes, if the step was chosen.

        Each rank writes a file of its own, ``NAME.jsonl.operators/rank-N.jsonl`` beside ``NAME.jsonl``, in which
        ``graphpasses locate`` finds the first operator at which two runs differ. Recording changes nothing in how
        eager runs. It takes about a millisecond for each operator, and the time to hash its tensors; only hashes are
        kept.

        Args:
            step: its number; of the others nothing is recorded.
            model: the module that the block trains, captured or not.
            batch: its tensors are hashed when the block begins.

        Raises:
            RunFileError: on all ranks; a file cannot be written.

        The class has an example.
        """
        if step not in self._operators:
            yield
            return
        with self._operator_file.step(step, model, batch, self._operators[step]):
            yield
        self._raise_together(self._operator_file.failure)

    def _open(self, header: bytes, overwrite: bool) -> str | None:
        """Opens the file and writes its header; returns what went wrong."""
        try:
            if overwrite:  # A process of an earlier run that still writes keeps the old file.
                self._path.unlink(missing_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return f"'{self._path}' exists already; name another file, or pass overwrite=True to replace it"
        except OSError as error:
            return f"cannot write '{self._path}': {error.strerror}"
        self._write(lambda: header)
        return self._failure

    def _write(self, make_line: Callable[[], bytes]) -> None:
        """Appends a line on rank 0, if all went well so far; what goes wrong is kept for :meth:`_raise_together`."""
        if self._is_closed:
            raise RunFileError(f"'{self._path}' is closed, and nothing is added to it; record inside the with block")
        if self._file is None or self._failure is not None:
            return
        try:
            line = make_line()
            num_written = os.write(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            self._failure = f"cannot write '{self._path}': {error.strerror}"
        except (AttributeError, TypeError, ValueError) as error:  # what JSON cannot take
            self._failure = f"cannot write '{self._path}': {error}"
        else:
            if num_written != len(line):
                self._failure = (
                    f"cannot write '{self._path}': only {num_written} of {len(line)} bytes fit on the disk"
                )

    def _raise_together(self, failure: str | None) -> None:
        """Raises on all ranks what went wrong on one, or the others would wait for it in the next step."""
        if found := list(filter(None, gathered(failure))):
            raise RunFileError(found[0])

    def record(
        self,
        step: int,
        loss: Tensor | float | None,
        model: nn.Module | Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None] | None = None,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Hashes the model and its gradients as they are now, and writes the step's line.

        Call it after ``optimizer.step()`` and before ``zero_grad()``. Record a step with loss None before the
        first one to distinguish runs that began with other weights from runs that diverged later.

        Args:
            step: its number; ascending.
            loss: one element; a plain tensor is each rank's own loss and all are kept. None if there is none.
            model: the module, sharded or not; or what to hash as its weights, by name.
            gradients: gradient of each parameter, by FQN (default: the ``.grad`` of a module's parameters).
            optimizer: its state, or that of several, is recorded, too, beside the weights of the module; without it
                another state shows in the weights of the next step alone.

        Raises:
            RunFileError: on all ranks; ``step`` does not ascend, the disk is full, JSON cannot take the step, ranks
                record other steps or losses of other dtypes, or the recorder was made before the process group, or
                is closed.
            UnsupportedError: the loss has more than one element, or is a DTensor that is not replicated;
                and see :func:`graphpasses.parity.tensor_hashes`.
            ReplicaMismatchError: see :func:`graphpasses.parity.tensor_hashes`.
        """
        if optimizer is not None and not isinstance(model, nn.Module):
            raise UnsupportedError("optimizer= needs the module as model; of tensors by name, add its state to them")
        losses = self._losses(step, loss, model)
        self._last_step = step
        if step in self._operators:
            self._operator_file.add_loss(step, loss)
            self._raise_together(self._operator_file.failure)
        if isinstance(model, nn.Module):
            gradients = named_gradients(model) if gradients is None else gradients
            optimizers = Optimizers.of(optimizer)
            of_optimizer = {} if optimizers is None else named_optimizer_state(model, optimizers)
            model = {**named_weights(model), **of_optimizer}
        # One call, hence one all-reduce, for both; a FQN cannot start with these marks.
        both: dict[str, Tensor | None] = {f"weight of {n}": t for n, t in model.items()}
        both |= {f"gradient of {n}": t for n, t in (gradients or {}).items()}
        per_rank = {f"{kind} of {name}" for kind in ("weight", "gradient") for name in self._per_rank}
        hashes = tensor_hashes(both, per_rank=per_rank, group=self._group)
        if self._group is not None:
            hashes = dict(ChainMap(*gathered(hashes)))  # of a buffer that several stages have the first one's
        weights = {n[len("weight of ") :]: h for n, h in hashes.items() if h and n.startswith("weight")}
        grads = {n[len("gradient of ") :]: h for n, h in hashes.items() if n.startswith("gradient")}
        self._write(lambda: run_file.step_line(run_file.StepRecord(step, losses, weights, grads)))
        self._raise_together(self._failure)
        self._num_steps += 1

    def record_layouts(self, layouts: Layout) -> None:
        """Writes bucket layouts that are known only when the run has compiled; see ``layouts`` of the recorder.

        Args:
            layouts: of the run's reductions; of several calls the last one counts. If they cannot be written, the
                next :meth:`record` says so on all ranks.
        """
        self._write(lambda: run_file.json_line({"layouts": layouts.named(unwrapped_name).to_json()}))

    def record_passes(self, passes: PipelineReport | Mapping[str, PipelineReport]) -> None:
        """Writes what passes did to the run's graphs, for ``graphpasses report``; not compared between runs.

        Call it once the graphs are there, before or after the steps; of several calls the last one counts.

        Args:
            passes: a rewritten step's ``report``, or reports by the graph's name
                (:attr:`graphpasses.CompileReport.by_graph`). Those of ``Pipeline.run(..., graph_diff=True)`` show the
                places that changed. If they cannot be written, the next :meth:`record` says so on all ranks.
        """
        by_graph = {"step": passes} if isinstance(passes, PipelineReport) else passes
        self._write(lambda: run_file.passes_line(by_graph))

    def _losses(self, step: int, loss: Tensor | float | None, model: object) -> run_file.Loss | None:
        """Gathers each rank's loss; raises on all ranks where one cannot record it, or records something else."""
        if (now := rank_of_world()[1]) != self._world_size:
            raise RunFileError(
                f"the recorder of '{self._path}' was made on {self._world_size} ranks, and {now} record: make it "
                "after init_process_group(), and close it before destroy_process_group()"
            )
        own, problem = None, None
        try:
            if self._last_step is not None and step <= self._last_step:
                raise RunFileError(f"step {step} cannot be recorded after step {self._last_step}")
            if not isinstance(model, nn.Module | Mapping):
                raise UnsupportedError(f"cannot record a {type(model).__name__}; give a module, or tensors by name")
            own = None if loss is None else _loss_of_rank(loss)
        except GraphPassesError as error:
            problem = error
        what = str(problem or f"step {step} with {'no loss' if own is None else f'a loss of {own.dtype}'}")
        everyone = gathered((what, own))
        for rank, (other, _) in enumerate(everyone):
            if other != everyone[0][0]:
                raise RunFileError(
                    f"ranks 0 and {rank} record other things ({everyone[0][0]}; {other}): all ranks must record the "
                    "same step, and either a loss of one dtype or none"
                )
        if problem is not None:
            raise problem
        losses = [each for _, each in everyone if each is not None]
        bits, values = (
            tuple(value for each in losses for value in getattr(each, name)) for name in ("bits", "values")
        )
        return run_file.Loss(losses[0].dtype, bits, values) if losses else None

    def close(self, *, complete: bool = True) -> None:
        """Ends the file, with a line that says that the run is complete if it is.

        Args:
            complete: whether the run ended in order.

        Raises:
            RunFileError: on rank 0; the disk is full.
        """
        if complete and not self._is_closed:
            self._write(lambda: run_file.end_line(self._num_steps))
        self._is_closed = True
        if self._file is None:  # not rank 0, or closed already
            return
        os.close(self._file)
        self._file = None
        if complete and self._failure is not None:
            raise RunFileError(self._failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(complete=error is None)


def _loss_of_rank(loss: Tensor | float) -> run_file.Loss:
    if isinstance(loss, DTensor):
        if not all(placement.is_replicate() for placement in loss.placements):
            raise UnsupportedError(f"cannot record a loss placed as {list(loss.placements)}; replicate it first")
        loss = loss.to_local()
    try:
        loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError):
        raise UnsupportedError(f"cannot record {loss!r} as a loss; give a tensor or a number") from None
    size = loss.element_size()
    if loss.numel() != 1 or size not in _WORDS:
        raise UnsupportedError(f"cannot record a loss of shape {list(loss.shape)} and dtype {loss.dtype}")
    word = int(loss.reshape(1).view(_WORDS[size]).item()) & ((1 << 8 * size) - 1)
    return run_file.Loss(str(loss.dtype).removeprefix("torch."), (f"{word:0{2 * size}x}",), (repr(loss.item()),))
