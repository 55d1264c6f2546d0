"""Fake results of single operators."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import _meta_registrations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from graphpasses._torch.schemas import named_values

aten = torch.ops.aten


def _rrelu(mode: FakeTensorMode, operator: Any, tensor: torch.Tensor, noise: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Returns a contiguous tensor, as the kernel does; torch's fake keeps strides."""
    with mode:
        result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        is_functional = operator == aten.rrelu_with_noise_functional.default
        return (result, torch.empty_like(noise)) if is_functional else result


def _broadcast(mode: FakeTensorMode, _: Any, sent: Any, *__: Any) -> Any:
    """Returns contiguous tensors, as the kernels do; torch's fakes keep strides."""
    with mode:
        new = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        return [*map(new, sent)] if isinstance(sent, (list, tuple)) else new(sent)


def _ctc_loss(mode: FakeTensorMode, _: Any, *args: Any, **__: Any) -> Any:
    """Returns the losses, and what backward reads of each place up to the end of the longest target."""
    scores, lengths = args[0], args[3]
    num_places = _unknown_size(mode) if isinstance(lengths, torch.Tensor) else 2 * max(lengths) + 1
    num_steps, num_samples, _ = scores.shape
    with mode:
        return scores.new_empty(num_samples), scores.new_empty(num_samples, num_steps, num_places)


def _unknown_size(mode: FakeTensorMode) -> torch.SymInt:
    sizes = mode.shape_env
    assert sizes is not None
    # Where no node brings the size, as in Dynamo, to which the operator is one, nobody looks for it.
    with nullcontext() if get_proxy_mode() else sizes.ignore_fresh_unbacked_symbols():
        return sizes.create_unbacked_symint()


def _rnn_layer(mode: FakeTensorMode, _: Any, *args: Any, **__: Any) -> Any:
    """Returns what oneDNN's backward reads, too, of a size that oneDNN knows, where the kernel sees that gradients
    are on, as it asks itself; else None.
    """
    with mode:
        *results, _ = _meta_registrations.mkldnn_rnn_layer(*args)
        kept = args[0].new_empty(_unknown_size(mode), dtype=torch.uint8) if torch.is_grad_enabled() else None
        return *results, kept


def _ctc_loss_backward(mode: FakeTensorMode, _: Any, gradient: torch.Tensor, scores: torch.Tensor, *__: Any) -> Any:
    with mode:
        return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _efficient_attention(mode: FakeTensorMode, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns seed and offset where the kernel leaves them unless a CUDA graph is recorded."""
    meta = getattr(_meta_registrations, f"meta_{operator._schema.name.removeprefix('aten::')}")
    given = named_values(operator, args, kwargs)
    device = torch.device("cpu") if given.get("dropout_p") else _device_of_no_seeds(given["query"].device)
    with mode:
        output, logsumexp, _, _, *sizes = meta(*args, **kwargs)
        return output, logsumexp, *(torch.empty((), dtype=torch.long, device=device) for _ in range(2)), *sizes


def _arange(mode: FakeTensorMode, _: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns as many elements as fractions that only running tells give; torch's fake converts none to these."""
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    if not any(isinstance(each, torch.SymFloat) for each in (start, end, step)):
        return NotImplemented
    dtype = kwargs["dtype"] = kwargs.get("dtype") or torch.get_default_dtype()
    if dtype == torch.int64:
        start, end, step = map(torch.sym_int, (start, end, step))
    with mode:
        return torch.empty(math.ceil((end - start) / step), **kwargs)


def unbind(tensor: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Selects as the kernel does; torch's splits, and leaves a dim of which it does not know that it has one item."""
    return tuple(tensor.select(dim, index) for index in range(tensor.shape[dim]))


@lru_cache
def _device_of_no_seeds(device: torch.device) -> torch.device:
    """Returns where efficient attention without dropout leaves the seed that it does not have: it is asked.

    That is the CPU with torch 2.13, and the device with 2.15; with dropout it is the CPU with both.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return torch.device("cpu")
    few = torch.zeros(1, 1, 1, 8, device=device)
    seed: torch.Tensor = aten._scaled_dot_product_efficient_attention.default(few, few, few, None, False)[2]
    return seed.device


# Fake results of operators, for which torch has none, or others than the kernels give.
FAKE_RESULTS: dict[Any, Any] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten.mkldnn_rnn_layer.default: _rnn_layer,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    aten._efficient_attention_forward.default: _efficient_attention,
    torch.ops._c10d_functional.broadcast.default: _broadcast,
    torch.ops._c10d_functional.all_reduce_coalesced.default: _broadcast,
}
