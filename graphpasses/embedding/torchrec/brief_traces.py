"""What TorchRec does for each of its modules, in fewer steps of Python while Dynamo traces it.

Dynamo interprets TorchRec's Python anew for each sharded module, 10,000 instructions, which is half of the time until
a model's first step is done. Each patch here does what the original does where it is traced, except what leaves
nothing in a graph: names for a profiler, logs, values that are computed again, and numbers read for checks that are
off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from graphpasses._torch.traced_calls import (
    ALL_TO_ALL_SINGLE,
    TENSOR_METADATA,
    traced_all_to_all_single,
    without_memory_format,
)
from graphpasses.embedding.torchrec.patching import Patch


def _is_compiling(original: Callable[[], bool]) -> Callable[[], bool]:
    """The original calls two functions before it asks Dynamo, and is asked twenty times for a module."""

    def is_torchdynamo_compiling() -> bool:
        return torch.compiler.is_dynamo_compiling() or original()

    return is_torchdynamo_compiling


def _without_names(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original names a block for the profiler, which sees none of what Dynamo traces."""

    def enter(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        if not torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        return nullcontext()

    enter.__name__ = original.__name__
    return enter


def _without_events(original: Any) -> Any:
    """The original is a generator's context around forwards; it logs nothing in TorchRec's public builds."""
    return classmethod(_without_names(original.__func__))


def _wait_unnamed(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original names its block for the profiler, too."""

    def wait(self: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return original(self)
        result = self._wait_impl()
        for callback in self.callbacks:
            result = callback(result)
        return result

    return wait


def _read_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original also reads the splits that were sent, for a check that ``TORCHREC_OVERFLOW_DEBUG`` turns on."""
    from torchrec.distributed import dist_data

    def _wait_impl(self: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() or dist_data._TORCHREC_OVERFLOW_DEBUG:
            return original(self)
        splits = self._output_tensor.view(self.num_workers, -1).T.tolist()
        return splits[: self._num_original_tensors] if self._tag_appended else splits

    return _wait_impl


def _keep(attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        """The original also asks for all that its value is computed from, and sets it, where the value is known."""

        def method(self: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                value = getattr(self, attribute)
                if value is not None:
                    return value
            return original(self)

        method.__name__ = original.__name__
        return method

    return wrap


def _with_dims_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original moves the tables' dims to the CPU in each forward, and sets them as an attribute of the module."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import generate_vbe_metadata

    def _generate_vbe_metadata(
        self: Any,
        offsets: Tensor,
        batch_size_per_feature_per_rank: list[list[int]] | None,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Any:
        if (
            not torch.compiler.is_dynamo_compiling()
            or batch_size_per_feature_per_rank is not None
            or self.feature_dims.device.type != "cpu"
        ):
            return original(self, offsets, batch_size_per_feature_per_rank, vbe_output, vbe_output_offsets)
        return generate_vbe_metadata(
            offsets,
            None,
            self.pooling_mode,
            self.feature_dims,
            self.current_device,
            vbe_output,
            vbe_output_offsets,
        )

    return _generate_vbe_metadata


_DIST = "torchrec.distributed"
_TBE = "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen"
_KEYED = "torchrec.sparse.jagged_tensor:KeyedJaggedTensor"
BRIEF_TRACES = (
    Patch(ALL_TO_ALL_SINGLE, traced_all_to_all_single),
    Patch(TENSOR_METADATA, without_memory_format),
    Patch(f"{_DIST}.logging_handlers:EventLoggingHandler.n_batch_log_event_context", _without_events),
    Patch(f"{_DIST}.types:Awaitable.wait", _wait_unnamed),
    Patch(f"{_DIST}.dist_data:SplitsAllToAllAwaitable._wait_impl", _read_splits),
    Patch(f"{_TBE}._generate_vbe_metadata", _with_dims_on_host),
    *(
        Patch(f"{_KEYED}.{name}", _keep(f"_{name}"))
        for name in ("stride", "stride_per_key", "length_per_key", "offset_per_key")
    ),
    *(
        Patch(f"{_DIST}.{module}:maybe_annotate_embedding_event", _without_names)
        for module in ("embeddingbag", "embedding", "embedding_sharding")
    ),
    *(
        Patch(f"{module}:is_torchdynamo_compiling", _is_compiling)
        for module in ("torchrec.pt2.checks", "torchrec.sparse.jagged_tensor")
    ),
    *(
        Patch(f"{_DIST}.{module}:is_torchdynamo_compiling", _is_compiling)
        for module in ("dist_data", "comm_ops")
    ),
)
