"""Kernels by Inductor that compute each operator as it is written: no contraction, no reordering, casts in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphpasses._torch.fake_mode import fake_mode_of

_DIVISION = "eager_numerics.division_rounding"
# What would let two operators become another, or an operator become an approximation.
_EXACT = {
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    # Inductor hands gcc -fno-signed-zeros and -fno-trapping-math; what follows the processor's flag comes after them.
    "cpp.march": "native -fsigned-zeros -ftrapping-math",
    "emulate_precision_casts": True,  # and no contraction in Triton's kernels
    _DIVISION: True,
    "eager_numerics.disable_ftz": True,
    "eager_numerics.use_pytorch_libdevice": True,
    "pattern_matcher": False,
    "fallback_random": True,
    "compile_threads": 1,  # what is compiled is one kernel
    "comprehensive_padding": False,
    "layout_optimization": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "cpp_wrapper": False,
    "freezing": False,
}


@contextmanager
def divisions_kept() -> Iterator[dict[str, bool]]:
    """Yields the setting by which Triton rounds quotients, and lets it be the same again afterwards."""
    kept = {_DIVISION: inductor_config.eager_numerics.division_rounding}
    with inductor_config.patch(kept):
        yield kept


@dataclass(frozen=True)
class Kernel:
    """What Inductor compiled."""

    call: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    # Under which it is on disk, of its operators, torch, the processor and all settings; None if it is not kept.
    name: str | None

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs it on a list of tensors, which it empties."""
        return self.call(tensors)


def cache_folder() -> Path:
    """Returns the folder in which Inductor keeps what it compiled."""
    return Path(cache_dir())


def compiler_version() -> str:
    """Returns what the compiler says of itself that Inductor calls."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    return str(get_compiler_version_info(get_cpp_compiler()))


def fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
    """Returns ``a * b + c``, rounded once; the tensors have one shape."""
    from torch._inductor import inductor_prims

    return inductor_prims.fma(a, b, c)


def trace_exactly(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Returns the operators that a function on tensors calls, for inputs of known sizes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode, torch.no_grad():
        fakes = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device) for each in inputs
        ]
        return make_fx(function, decomposition_table=_views())(*fakes)


@functools.cache
def _views() -> dict[Any, Any]:
    """Returns how Inductor writes views that it has no lowering for, such as ``t``."""
    from torch._inductor.decomposition import select_decomp_table

    return {op: rule for op, rule in select_decomp_table().items() if getattr(op, "is_view", False)}


def compile_exactly(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Kernel:
    """Compiles a function on tensors by Inductor, whose caches on disk are used.

    Args:
        function: takes tensors like ``inputs`` and returns a list of tensors, all of them made by it.
        inputs: tensors, fake or not, that have the sizes, the strides and the dtypes of all later ones.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    traced = trace_exactly(function, inputs)
    fakes = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
    # Without these Inductor keeps nothing on disk of what is no graph of AOTAutograd's.
    kept, context = functorch_config.patch(bundled_autograd_cache=False), TracingContext(fake_mode_of(fakes))
    with inductor_config.patch(_EXACT), kept, tracing(context), torch.no_grad():
        compiled: Any = compile_fx_inner(traced, fakes)
    return Kernel(compiled.current_callable, compiled._fx_graph_cache_key)
