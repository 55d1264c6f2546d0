"""Recording the operators of a step while it runs: hashed on the device, handed on in small batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from graphpasses._torch.operator_facts import kind_of, memory_of, read_tensors
from graphpasses._torch.operator_stream import OperatorStream, fsdp2_streamed
from graphpasses._torch.recorded_operator import Operator, Value
from graphpasses.parity._lanes import MASK, lanes
from graphpasses.parity.hashing import named_gradients, named_weights
from graphpasses.parity.operators import header_line, operator_file, operator_line

_MAX_PENDING = 256  # digests that stay on the device at a time


class OperatorFile:
    """The file of one rank's operators beside a run file; what fails is kept, so that all ranks raise it together."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._path, self._rank, self._world_size = operator_file(path, rank), rank, world_size
        self.failure: str | None = None
        self._last_step: int | None = None

    def remove(self) -> None:
        with self._failure_kept():
            self._path.unlink(missing_ok=True)

    @contextmanager
    def step(self, step: int, model: nn.Module, batch: Iterable[Any], keep: Iterable[int] = ()) -> Iterator[None]:
        """Writes the operators of a block, and to a file beside the tensors of those at the positions ``keep``."""
        with ExitStack() as stack:
            file: BinaryIO | None = None
            with self._failure_kept():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self._path.open("ab"))
                if file.tell() == 0:
                    file.write(header_line(str(torch.__version__), self._rank, self._world_size))

            num_operators = 0

            def write(data: Operator | dict[str, Any]) -> None:
                nonlocal num_operators
                num_operators += isinstance(data, Operator)
                if file is not None and self.failure is None:
                    with self._failure_kept():
                        file.write(operator_line(data))

            write({"step": step, "start": values_of(model, batch, gradients=False)})
            with operators_recorded(model, write, keep=frozenset(keep)) as stream:
                yield
            self._last_step = step
            values = values_of(model, gradients=True)
            write({"end": step, "num_operators": num_operators, "values": values})
            with self._failure_kept():
                if stream.kept:
                    torch.save(stream.kept, self._path.with_suffix(".pt"))
                if file is not None:
                    file.flush()
                    os.fsync(file.fileno())

    def add_loss(self, step: int, loss: Tensor | float | None) -> None:
        if loss is None or self._last_step != step:
            return
        value = loss if isinstance(loss, Tensor) else torch.tensor(loss, device="cpu")
        values = tuple(_with_digests(list(_seen({"loss": value}))))
        with self._failure_kept(), self._path.open("ab") as file:
            file.write(operator_line({"loss": step, "values": values}))

    @contextmanager
    def _failure_kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or f"cannot write '{self._path}': {error.strerror}"


@contextmanager
def operators_recorded(
    model: nn.Module, write: Callable[[Operator], object], *, keep: frozenset[int] = frozenset()
) -> Iterator[OperatorStream]:
    """Records the operators that a block calls; yields the stream that sees them."""
    pending: list[Operator] = []

    def add(call: Operator) -> None:
        pending.append(call)
        if sum(len(each.inputs) + len(each.outputs) for each in pending) >= _MAX_PENDING:
            flush()

    def flush() -> None:
        """Brings digests from their device, a few at a time: all that is held of tensors are hashes."""
        calls = [*pending]
        pending.clear()
        values = _with_digests([each for call in calls for each in (*call.inputs, *call.outputs)])
        for call in calls:
            inputs, outputs = (tuple(next(values) for _ in each) for each in (call.inputs, call.outputs))
            write(replace(call, inputs=inputs, outputs=outputs))

    stream = OperatorStream(model, _digest, add, keep=keep)
    with torch.autograd.set_multithreading_enabled(False), fsdp2_streamed(model, stream), stream:
        yield stream
    flush()


def values_of(
    model: nn.Module, batch: Iterable[Any] = (), *, gradients: bool, loss: Tensor | None = None
) -> tuple[Value, ...]:
    """Hashes what a rank holds of a model, of its batch and of its loss."""
    tensors: dict[str, Any] = {f"weight of {fqn}": each for fqn, each in named_weights(model).items()}
    tensors |= {f"batch[{index}]": each for index, each in enumerate(batch)}
    if gradients:
        tensors |= {f"gradient of {fqn}": each for fqn, each in named_gradients(model).items()}
    return tuple(_with_digests(list(_seen(tensors | {"loss": loss}))))


def _seen(tensors: Mapping[str, Any]) -> Iterator[Value]:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        for plain in read_tensors(tensor):
            digest = _digest(plain.detach()) if plain.layout == torch.strided else None
            yield Value(name, kind_of(plain), digest, memory_of(plain))


def _digest(tensor: Tensor) -> Tensor:
    """Both sums of a tensor's bits and their order, int64 [2], where it lives; its shape does not count."""
    return lanes(tensor, tensor.shape, [0] * tensor.dim())


def _with_digests(seen: list[Value]) -> Iterator[Value]:
    """Yields what was seen with its digests as text, brought from each device at once."""
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for digest in (each.digest for each in seen if each.digest is not None):
        by_device.setdefault(digest.device, {})[id(digest)] = digest
    texts: dict[int, str] = {}
    for digests in by_device.values():
        sums = torch.stack(list(digests.values())).tolist()
        for key, (low, high) in zip(digests, sums, strict=True):
            texts[key] = f"{(high & MASK) << 64 | (low & MASK):032x}"
    return (replace(each, digest=texts.get(id(each.digest))) for each in seen)
