"""TorchRec's communications of embeddings and gradients, traced, with the bits that they have in eager.

Quantized ones encode embeddings with one codec and gradients with another. Traced, TorchRec encodes embeddings, and
autograd derives the rest: gradients travel in the precision of embeddings, and are divided before they are decoded.
Here one function of autograd encodes and decodes both ways, so that what it takes and gives is not encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphpasses._torch.patching import traced
from graphpasses.errors import UnsupportedError
from graphpasses.ops.exchange_embeddings import EXCHANGE_EMBEDDINGS, exchange_embeddings
from graphpasses.ops.reduce_scatter_v import REDUCE_SCATTER_V, gather_parts

_PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)


def check_codecs(module: nn.Module) -> None:
    """Raises unless all codecs of a sharded TorchRec module keep the number of elements, as casts do."""
    sharded: Any = module
    for codecs in (sharded.qcomm_codecs_registry or {}).values():
        for direction in ("forward", "backward"):
            precision = getattr(codecs, direction).quantized_dtype
            if precision not in _PRECISIONS:
                raise UnsupportedError(
                    f"{(sharded._module_fqn or type(module).__name__)!r}: quantized communications whose {direction} "
                    f"precision is {precision} cannot be compiled, since scales travel among the numbers; use FP32, "
                    "FP16 or BF16 in QCommsConfig, or leave the model uncompiled"
                )


class _Carried:
    """Numbers that are yet to be encoded, and their codecs; takes the place of encoded numbers."""

    def __init__(self, tensor: Tensor, codecs: Any) -> None:
        self.tensor, self.codecs = tensor, codecs


class _CarryingCodec:
    """Takes the place of the codec for embeddings: leaves encoding and decoding to the all-to-all."""

    def __init__(self, codecs: Any) -> None:
        self.codecs = codecs

    def create_context(self) -> None:
        """Casts need none."""

    def padded_size(self, tensor: Tensor, dims: list[int], rank: int, context: None) -> tuple[int, int]:
        return tensor.shape[-1], 0

    def calc_quantized_size(self, size: int, context: None = None) -> int:
        return size

    def encode(self, tensor: Tensor, context: None = None) -> _Carried:
        return _Carried(tensor, self.codecs)

    def decode(self, tensor: Tensor, context: None = None) -> Tensor:
        return tensor


class _CarryingCodecs:  # which Dynamo traces; it knows no SimpleNamespace
    def __init__(self, codecs: Any) -> None:
        self.forward = _CarryingCodec(codecs)


def carried(original: Callable[..., Any], pg: Any, info: Any, tensor: Tensor) -> Any:
    """The original encodes before its all-to-all and decodes after it; traced, the all-to-all does both."""
    if info.codecs is not None:
        info.codecs = _CarryingCodecs(info.codecs)
    return original(pg, info, tensor)


carry_codecs = traced(carried)


def all_to_all_single(original: Any) -> Any:
    """The original is a function of autograd, which Dynamo traces at each call, and knows nothing of codecs."""

    class AllToAllSingle:
        @staticmethod
        def apply(
            tensor: Tensor | _Carried,
            output_splits: Sequence[int],
            input_splits: Sequence[int],
            group: str,
            group_size: int,
            gradient_division: bool,
        ) -> Tensor:
            divisor = group_size if gradient_division else 1
            if not isinstance(tensor, _Carried):
                return EXCHANGE_EMBEDDINGS(tensor, output_splits, input_splits, group, divisor)  # type: ignore[no-any-return]
            codecs = tensor.codecs.forward, tensor.codecs.backward
            return exchange_embeddings(tensor.tensor, output_splits, input_splits, group, divisor, *codecs)

    return AllToAllSingle


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Sequence[int],
        rank: int,
        group: str,
        divisor: int,
        codec: Any,
        gradient_codec: Any,
    ) -> Tensor:
        ctx.splits, ctx.rank, ctx.group = splits, rank, group
        ctx.divisor, ctx.codec = divisor, gradient_codec
        encoded = codec.encode(tensor, codec.create_context())
        decoded: Tensor = codec.decode(
            REDUCE_SCATTER_V(encoded, splits, rank, group, divisor), codec.create_context()
        )
        return decoded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        encoded = ctx.codec.encode(gradients[0], ctx.codec.create_context())
        gathered = gather_parts(encoded, ctx.splits, ctx.rank, ctx.group)
        gradient = ctx.codec.decode(gathered, ctx.codec.create_context()) / ctx.divisor
        return gradient, None, None, None, None, None, None


@traced
def reduce_as_eager(original: Callable[..., Any], pg: Any, rsi: Any, input: Tensor) -> Any:
    """The original, traced, adds what an all-to-all brought, in another order than eager's reduce-scatter.

    Two numbers have only one sum: between two ranks the all-to-all, which passes merge, stays if nothing is encoded.
    """
    from torchrec.distributed.comm_ops import get_gradient_division, pg_name

    if pg.size() <= 2 and rsi.codecs is None:
        return original(pg, rsi, input)
    arguments = rsi.input_splits, pg.rank(), pg_name(pg), pg.size() if get_gradient_division() else 1
    if rsi.codecs is None:
        return REDUCE_SCATTER_V(input, *arguments)
    codecs = rsi.codecs.forward, rsi.codecs.backward
    return _ReduceScatter.apply(input, *arguments, *codecs)  # type: ignore[no-untyped-call]
