"""Functions of torch that run for each node of a traced graph, without what nothing reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphpasses._torch.tested_versions import missing_api

try:
    from torch.distributed._functional_collectives import _group_or_group_name, _resolve_group
except ImportError as error:
    raise missing_api("a compiled TorchRec model", error, "2.13") from error

ALL_TO_ALL_SINGLE = "torch.distributed._functional_collectives:all_to_all_single"
TENSOR_METADATA = "torch.fx.experimental.proxy_tensor:_extract_tensor_metadata"


def traced_all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original checks the type of each split in Python, 150 instructions of which the operator does the same."""

    def all_to_all_single(
        self: Tensor,
        output_split_sizes: list[int] | None,
        input_split_sizes: list[int] | None,
        group: Any,
        tag: str = "",
    ) -> Tensor:
        if (
            not torch.compiler.is_dynamo_compiling()
            or output_split_sizes is None
            or input_split_sizes is None
        ):
            return original(self, output_split_sizes, input_split_sizes, group, tag)  # type: ignore[no-any-return]
        received = torch.ops._c10d_functional.all_to_all_single(
            self, output_split_sizes, input_split_sizes, _group_or_group_name(_resolve_group(group, tag))
        )
        return torch.ops._c10d_functional.wait_tensor(received)  # type: ignore[no-any-return]

    return all_to_all_single


def read_size(sizes: Tensor, index: int) -> int:
    """Reads a number that a tracer shall take for a size."""
    size: int = sizes[index].item()  # type: ignore[assignment]
    torch._check_is_size(size)  # type: ignore[no-untyped-call]
    return size


def without_memory_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original asks of each traced tensor whether it is contiguous for all sizes; nobody reads it."""

    def _extract_tensor_metadata(result: Tensor, include_contiguity: bool = True) -> Any:
        return original(result, include_contiguity=False)

    return _extract_tensor_metadata
