"""How ids go to the ranks that have their tables, traced in few steps and symbols.

What a rank receives is known from less than TorchRec reads: a rank gets from itself what it sent; the rows that come
from another rank follow from its batch size, and how many weights come from how many ids. So of each other rank a
graph reads two numbers, and has no symbols that it would have to compare. All that eager sends is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphpasses._torch.dynamo import read_size
from graphpasses._torch.patching import Patch, traced
from graphpasses.ops.exchange_embeddings import send_and_wait
from graphpasses.ops.size_tensor import SIZE_TENSOR


def _exchange(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original makes a tensor of each kind of size, reads all that it receives, and compares what it knows."""
    from torchrec.distributed import dist_data
    from torchrec.distributed.collective_utils import validate_collectives_enabled
    from torchrec.distributed.comm_ops import pg_name

    class Sizes:
        """Takes the place of a ``KJTAllToAllSplitsAwaitable``: the sizes of the parts are on their way."""

        def __init__(self, exchange: Any, features: Any, parts: type) -> None:
            group, ends = exchange._pg, exchange._splits_cumsum
            stride, lengths = features.stride(), features.length_per_key()
            ranks = range(group.size())
            self._exchange, self._features = exchange, features
            self._parts = parts  # which Dynamo would not know as a cell of this class
            self._rows = [sum([stride] * (ends[rank + 1] - ends[rank])) for rank in ranks]
            self._ids = [sum(lengths[ends[rank] : ends[rank + 1]]) for rank in ranks]
            is_weighted = features.weights_or_none() is not None
            self._width = 4 if is_weighted else 3
            sent = []
            for rank in ranks:
                ids = [self._ids[rank]] * (2 if is_weighted else 1)
                sent += [self._rows[rank], *ids, stride]
            splits = [self._width] * group.size()
            self._received = send_and_wait(
                SIZE_TENSOR(sent, torch.int64, features.device()), splits, splits, pg_name(group)
            )

        def wait(self) -> Any:
            exchange, own = self._exchange, self._exchange._pg.rank()
            strides, ids = [], []
            for rank in range(exchange._pg.size()):
                if rank == own:
                    num_ids, stride = self._ids[rank], self._features.stride()
                else:
                    num_ids = read_size(self._received, rank * self._width + 1)
                    stride = read_size(self._received, (rank + 1) * self._width - 1)
                ids.append(num_ids)
                strides.append(stride)
            return self._parts(exchange, self._features, (self._rows, self._ids), (strides, ids))

    class Parts(dist_data.KJTAllToAllTensorsAwaitable):  # type: ignore[misc]
        """Has the attributes of the original's that sharded modules read."""

        def __init__(self, exchange: Any, features: Any, sent: Any, received: Any) -> None:
            group, splits = exchange._pg, exchange._splits
            own = group.rank()
            start = exchange._splits_cumsum[own]
            (rows, ids), (strides, received_ids) = sent, received
            received_rows = [sum([stride] * splits[own]) for stride in strides]
            labels, tensors = features.dist_labels(), features.dist_tensors()
            self._features, self._keys = features, features.keys()[start : start + splits[own]]
            self._num_ranks, self._stagger = group.size(), exchange._stagger
            self._stride_per_rank = strides
            self._recat = None
            if splits[own] > 1 or exchange._stagger > 1:  # one feature lies as it comes, rank by rank
                self._recat = dist_data._get_recat(
                    splits[own], len(splits), exchange._stagger, features.device(), strides
                )
            self._input_splits = {label: rows if label == "lengths" else ids for label in labels}
            self._output_splits = {label: received_rows if label == "lengths" else received_ids for label in labels}
            name = pg_name(group)
            self._tensors = [
                send_and_wait(tensor, self._output_splits[label], self._input_splits[label], name)
                for label, tensor in zip(labels, tensors, strict=True)
            ]

        def wait(self) -> Any:
            return type(self._features).dist_init(
                self._keys, self._tensors, False, self._num_ranks, self._recat, self._stride_per_rank, self._stagger
            )

    def forward(self: Any, input: Any) -> Any:
        if (
            not torch.compiler.is_dynamo_compiling()
            or input.variable_stride_per_key()
            or self._pg.size() == 1
            or dist_data._TORCHREC_OVERFLOW_DEBUG
            or validate_collectives_enabled()
            or len(input.keys()) != self._splits_cumsum[-1]
        ):
            return original(self, input)
        with torch.no_grad():
            return Sizes(self, input, Parts)

    return forward


@traced
def _split(original: Callable[..., Any], self: Any, segments: list[int]) -> Any:
    """The original reads how many ids each feature has, also where all features stay together."""
    is_whole = len(segments) == 1 and segments[0] == len(self.keys())
    return [self] if is_whole else original(self, segments)


@traced
def _permute(
    original: Callable[..., Any], self: Any, indices: list[int], indices_tensor: Tensor | None = None
) -> Any:
    """The original, traced, calls an operator that refuses a batch without samples, and reads more than is needed."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if self.variable_stride_per_key() or indices_tensor is None or not indices:
        return original(self, indices, indices_tensor)
    names = self.keys()
    keys = [names[index] for index in indices]
    if statically_known_true(self.lengths().numel() == 0):  # the stride itself never is a constant
        return KeyedJaggedTensor(
            keys=keys,
            values=self.values(),
            weights=self.weights_or_none(),
            lengths=self.lengths(),
            stride=0,
            length_per_key=[0] * len(indices),
        )
    known = self.length_per_key()
    length_per_key = [known[index] for index in indices]
    lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data_input1D(
        indices_tensor, self.lengths(), self.values(), self.stride(), self.weights_or_none(), sum(length_per_key)
    )
    return KeyedJaggedTensor(
        keys=keys, values=values, weights=weights, lengths=lengths, stride=self._stride, length_per_key=length_per_key
    )


_DIST = "torchrec.distributed"
_KEYED = "torchrec.sparse.jagged_tensor:KeyedJaggedTensor"
TRACED_DISTS = (
    Patch(f"{_DIST}.dist_data:KJTAllToAll.forward", _exchange),
    Patch(f"{_KEYED}.split", _split),
    Patch(f"{_KEYED}.permute", _permute),
)
