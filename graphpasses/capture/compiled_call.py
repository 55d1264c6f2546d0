"""What happens around each call of a model that the backend ``graphpasses`` compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import nn

from graphpasses._torch.compile_backend import uncompiled
from graphpasses._torch.ddp import is_replicated, orders_buckets, orders_replicated, running_ddp
from graphpasses._torch.dynamo import BackendCompilerFailed, graphs_uncut, is_eager_forced, record_graph_breaks
from graphpasses.capture.compile_report import CompileReport
from graphpasses.capture.named_modules import find_modules
from graphpasses.capture.refusals import check_materialised
from graphpasses.errors import GraphPassesError, UnsupportedError

if TYPE_CHECKING:
    from graphpasses.capture.compile_options import CompileOptions
    from graphpasses.embedding.torchrec.model_call import ModelCall

_DDP = nn.parallel.DistributedDataParallel
_RUNNING: ContextVar[CompiledCall | None] = ContextVar("_RUNNING", default=None)
# In the innermost call: graphs with collectives that ran.
_PLACE: ContextVar[int] = ContextVar("_PLACE", default=0)
_CASTS: ContextVar[set[int] | None] = ContextVar("_CASTS", default=None)


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
        self._report = options.report
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

    def note(self, text: str) -> None:
        """Adds a line to the report, once."""
        self._report.note(text)

    @staticmethod
    def place() -> int:
        """Returns how many graphs with collectives the innermost call has run; ranks may differ in the others."""
        return _PLACE.get()

    @staticmethod
    def casts() -> set[int]:
        """Returns which weights the graphs of the innermost call have cast under autocast, by ``id``."""
        casts = _CASTS.get()
        return set() if casts is None else casts

    @staticmethod
    def counted(compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a compiled graph with collectives, so that the graphs that run after it have another place."""

        def call(*values: Any) -> Any:
            _PLACE.set(_PLACE.get() + 1)
            return compiled(*values)

        return call

    @staticmethod
    def running() -> CompiledCall | None:
        """Returns the innermost call that runs now."""
        return _RUNNING.get()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function; what it was made of, where ``torch.compiler.set_stance`` asks for eager."""
        if is_eager_forced():
            return uncompiled(self._compiled)(*args, **kwargs)
        CompiledCall.num_compiled += 1
        if self._reducers is None:
            for module in self._modules:
                check_materialised(module, "before the first call of what torch.compile returned")
            self._reducers = self._find_reducers()
        running, place, casts = _RUNNING.set(self), _PLACE.set(0), _CASTS.set(set())
        try:
            with record_graph_breaks() as graph_breaks, graphs_uncut():
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
            _RUNNING.reset(running)
            _PLACE.reset(place)
            _CASTS.reset(casts)
            if graph_breaks:
                self._report.graph_breaks += graph_breaks
                self._report.write()
