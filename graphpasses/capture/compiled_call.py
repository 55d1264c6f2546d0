"""What happens around each call of a model that the backend ``graphpasses`` compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from graphpasses._torch.compile_backend import uncompiled
from graphpasses._torch.ddp import is_replicated, orders_buckets, orders_replicated, running_ddp
from graphpasses._torch.dynamo import BackendCompilerFailed, graphs_uncut, is_eager_forced, record_graph_breaks
from graphpasses._torch.traced_floats import FLOATS_ASKED
from graphpasses.capture.compile_report import CompileReport
from graphpasses.capture.refusals import check_materialised
from graphpasses.errors import GraphPassesError, UnsupportedError
from graphpasses.state.calls import names_of
from graphpasses.state.keys import CONTAINERS, attributes_of, items_of, read_cell
from graphpasses.state.origin import is_users

if TYPE_CHECKING:
    from graphpasses.capture.compile_options import CompileOptions
    from graphpasses.embedding.torchrec.model_call import ModelCall

_DDP = nn.parallel.DistributedDataParallel


@dataclass
class Running:
    """The innermost call of a compiled function that runs now."""

    call: CompiledCall | None = None  # None where none runs
    place: int = 0  # how many graphs with collectives it has run; ranks may differ in the others
    casts: set[int] = field(default_factory=set)  # which weights its graphs have cast under autocast, by ``id``


_RUNNING: ContextVar[Running | None] = ContextVar("_RUNNING", default=None)


def running() -> Running:
    return _RUNNING.get() or Running()


class CompiledCall:
    """Calls a compiled function, as TorchRec's models and DistributedDataParallel need it.

    A compiled backward makes all gradients at once. Where their order is to become that of the buckets of a
    DistributedDataParallel, in the model or around it, eager runs. ``options`` are what the user gave
    ``torch.compile``, ``root`` is what the user compiles, and ``compiled`` what Dynamo made of it.
    """

    num_compiled = 0
    """How many calls, of any compiled function, were not eager's."""

    def __init__(self, options: CompileOptions, root: Any, compiled: Callable[..., Any]) -> None:
        self.options = options
        assert isinstance(options.report, CompileReport)
        self.report = options.report
        self._compiled = compiled
        self._modules = find_modules(root)
        self.model = self._modules[0] if len(self._modules) == 1 else nn.ModuleList(self._modules)
        self.remembered: dict[Hashable, Any] = {}  # from one compilation to the next
        self._reducers: list[nn.Module] | None = None  # what reduces gradients in hooks, since the first call
        self._torchrec: ModelCall | None = None

    def in_order(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a compiled graph, so that the model's gradients are reduced in one order on all ranks."""
        return compiled if self._torchrec is None else self._torchrec.ddp.in_order(compiled)

    @property
    def reduces_gradients(self) -> bool:
        """Whether DistributedDataParallel modules in the model reduce gradients as they are accumulated."""
        return self._torchrec is not None and bool(self._torchrec.ddp.modules)

    def _find_reducers(self) -> list[nn.Module]:
        every = (module for each in self._modules for module in each.modules())
        return [each for each in every if isinstance(each, _DDP) or is_replicated(each)]

    def check_reducers(self) -> None:
        """To be called while Dynamo traces: raises if hooks that reduce gradients came after the first call."""
        found = self._find_reducers() if self._torchrec is None else []
        new = [each for each in found if each not in (self._reducers or ())]
        if any(orders_buckets(each) if isinstance(each, _DDP) else orders_replicated(each) for each in new):
            raise UnsupportedError(
                "DistributedDataParallel, or replicate(), was put into a compiled model after its first call, and on "
                "more than two ranks its first steps must run as in eager: do so before it"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function; what it was made of, where ``torch.compiler.set_stance`` asks for eager."""
        if is_eager_forced():
            return uncompiled(self._compiled)(*args, **kwargs)
        CompiledCall.num_compiled += 1
        if self._reducers is None:
            for module in self._modules:
                check_materialised(module, "before the first call of what torch.compile returned")
            self._reducers = self._find_reducers()
        token = _RUNNING.set(Running(self))
        try:
            with record_graph_breaks() as graph_breaks, graphs_uncut(), FLOATS_ASKED:
                around = running_ddp()
                replicated = [each for each in self._reducers if not isinstance(each, _DDP)]
                if (around is not None and orders_buckets(around)) or any(map(orders_replicated, replicated)):
                    return uncompiled(self._compiled)(*args, **kwargs)
                if "torchrec" not in sys.modules and len(replicated) == len(self._reducers):
                    return self._compiled(*args, **kwargs)
                if self._torchrec is None:
                    from graphpasses.embedding.torchrec.model_call import ModelCall

                    self._torchrec = ModelCall(self._modules, self._compiled, uncompiled(self._compiled))
                return self._torchrec(args, kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, GraphPassesError):
                raise error.inner_exception from None
            raise
        finally:
            _RUNNING.reset(token)
            if graph_breaks:
                self.report.graph_breaks += graph_breaks
                self.report.write()


def find_modules(root: Any) -> list[nn.Module]:
    """Returns the modules that a function, and what it calls, has names for; outer ones only."""
    found: dict[int, Any] = {}
    names: dict[str, None] = {"__call__": None}
    pending, size = [root], -1
    while pending or size != (size := len(names) + len(found)):
        for value in pending:
            found[id(value)] = value
        pending = [each for value in [*found.values()] for each in _reached(value, names) if id(each) not in found]
    return [value for value in found.values() if isinstance(value, nn.Module)]


def _reached(value: Any, names: dict[str, None]) -> Iterator[Any]:
    """Yields what code reaches from a value; ``names`` are those of attributes, and get the code's."""
    if isinstance(value, (nn.Module, type)):
        return
    if isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, CONTAINERS):
        yield from (item for _, item in items_of(value))
    elif isinstance(value, FunctionType):
        if is_users(value):
            globals_ = _globals_of(value.__code__, names)
            yield from (value.__globals__[name] for name in globals_ if name in value.__globals__)
            yield from map(read_cell, value.__closure__ or ())
            yield from (value.__defaults__ or ())
    else:
        own = attributes_of(value) or {}
        of_class = {name: each for base in type(value).__mro__ if is_users(base) for name, each in vars(base).items()}
        yield from ({**of_class, **own}[name] for name in names if name in own or name in of_class)


def _globals_of(code: CodeType, names: dict[str, None]) -> set[str]:
    found = names_of(code)
    names |= dict.fromkeys(found.attributes)
    nested = (_globals_of(each, names) for each in code.co_consts if isinstance(each, CodeType))
    return {*found.globals}.union(*nested)
