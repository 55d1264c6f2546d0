"""What the constants of a graph hold, as data that no pass can reach."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from graphpasses._torch.fake_mode import is_fake, outside_tracing

_MAX_BYTES = 1 << 28  # larger ones are known by what they are: to read them takes seconds


def attribute(node: fx.Node) -> Any:
    """Returns what a ``get_attr`` node reads of its module."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def read_constants(graph: fx.Graph) -> dict[str, Hashable]:
    """Returns, by the names of a graph's attributes, what they hold now."""
    return {str(node.target): constant_bits(attribute(node)) for node in graph.find_nodes(op="get_attr")}


def constant_bits(value: Any) -> Hashable:
    """Returns a key of what a constant holds: equal keys are equal bits, of a graph equal calls and constants."""
    if isinstance(value, fx.GraphModule):
        return str(value.code), tuple(read_constants(value.graph).items())
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not is_plain or is_fake(value) or value.is_meta or value.nbytes > _MAX_BYTES:
        return id(value)
    with outside_tracing():
        data = value.detach().resolve_conj().resolve_neg().contiguous().cpu().view(-1).view(torch.uint8)
        digest = hashlib.sha256(data.numpy()).hexdigest()
    return value.dtype, value.device, tuple(value.shape), value.stride(), digest
