"""A compiled module, as symbolic tracing sees it."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._dynamo.eval_frame import OptimizedModule
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from graphpasses._torch import pytree
from graphpasses.errors import UnsupportedError


class CompiledModule(OptimizedModule):
    """What ``torch.compile`` makes of a module; symbolic tracing records one call of it.

    torch's own has no ``forward`` that :class:`torch.fx.Tracer` could trace, and traces what its modules call with
    proxies for tensors. TorchRec's pipelines trace their models, to find modules whose input dists they could start
    early: those in a compiled module are part of what was compiled.

    Example:
        >>> compiled = graphpasses.compile(nn.Linear(2, 1))
        >>> [node.op for node in torch.fx.Tracer().trace(compiled).nodes]
        ['placeholder', 'placeholder', 'call_function', 'output']
    """

    dynamo_ctx: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_fx_symbolic_tracing() and any(map(_is_proxy, pytree.tree_leaves((args, kwargs)))):
            return self._record(args, kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module: the class's own, which a tracer calls; instances have what Dynamo compiled."""
        # A tracer gives each of them as one proxy.
        return self._record(args, kwargs) if _is_proxy(args) else self(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refuses to compile what is compiled, as ``TrainPipelinePT2`` would."""
        name = self.dynamo_ctx.backend.__name__
        raise UnsupportedError(
            f"{type(self._orig_mod).__name__} is compiled already, for the backend {name!r}: what compiles its model "
            f"by itself, as TrainPipelinePT2 does, takes the uncompiled one, and TorchCompileConfig(backend={name!r})"
        )

    def _record(self, args: Any, kwargs: Any) -> fx.Proxy:
        self.dynamo_ctx.backend.when_recorded()
        proxy: fx.Proxy = next(filter(_is_proxy, pytree.tree_leaves((args, kwargs))))

        def call(args: Any, kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return proxy.tracer.create_proxy("call_function", call, (args, kwargs), {})


def _is_proxy(value: Any) -> bool:
    return isinstance(value, fx.Proxy)
