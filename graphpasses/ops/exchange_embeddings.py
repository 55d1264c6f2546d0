"""The all-to-all of embeddings, whose gradient is an all-to-all back, as one operator of Dynamo's graphs.

TorchRec has an ``autograd.Function`` for it, whose forward and backward Dynamo traces anew for each module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphpasses.ops.define import define_operator


def exchange_embeddings(
    tensor: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: str,
    divisor: int,
    codec: Any = None,
    gradient_codec: Any = None,
) -> Tensor:
    """Sends each rank its part of a tensor, [sum(input_splits), ...]; returns what comes, [sum(output_splits), ...].

    Gradients go back and are divided by ``divisor`` there. TorchRec's codecs encode what is sent and decode what
    comes.
    """
    splits = output_splits, input_splits
    result: Tensor = _Exchange.apply(tensor, *splits, group, divisor, codec, gradient_codec)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        group: str,
        divisor: int,
        codec: Any,
        gradient_codec: Any,
    ) -> Tensor:
        ctx.splits, ctx.group = (input_splits, output_splits), group
        ctx.divisor, ctx.codec = divisor, gradient_codec
        return send_and_wait(tensor, output_splits, input_splits, group, codec)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        output_splits, input_splits = ctx.splits
        gradient = send_and_wait(gradients[0], output_splits, input_splits, ctx.group, ctx.codec)
        return gradient if ctx.divisor == 1 else gradient / ctx.divisor, None, None, None, None, None, None


def send_and_wait(
    tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str, codec: Any = None
) -> Tensor:
    """Sends each rank its part of a tensor, and waits for what comes; a codec encodes and decodes."""
    encoded = tensor if codec is None else codec.encode(tensor, codec.create_context())
    sent = torch.ops._c10d_functional.all_to_all_single(encoded, output_splits, input_splits, group)
    received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return received if codec is None else codec.decode(received, codec.create_context())


EXCHANGE_EMBEDDINGS = define_operator(
    "exchange_embeddings(Tensor tensor, SymInt[] output_splits, SymInt[] input_splits, str group, int divisor) "
    "-> Tensor",
    exchange_embeddings,
    fake=None,
)
# Where this rank does not read what it gets, others wait for it all the same.
torch.fx.node.has_side_effect(EXCHANGE_EMBEDDINGS)
