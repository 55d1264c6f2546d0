"""Whether an optimizer updates an element to the same bits, in whatever shard it lies."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from graphpasses._torch.dtensor import local_part
from graphpasses.errors import UnsupportedError

_NUM_STEPS = 3
_SIZES = [1, 2, 3, 5, 7] * 80  # of the pieces: less than a vector of any kernel


def check_canonical_update(optimizer: torch.optim.Optimizer) -> None:
    """Raises if what an optimizer makes of an element depends on the shard in which it lies.

    Kernels compute whole vectors of a shard otherwise than what is left of it, where they round once for a product
    and a sum in one and twice in the other. It is tried: random weights are updated as one tensor and in pieces, by
    copies of the optimizer with its hyperparameters, dtypes and devices. Nothing of the optimizer changes. On a CPU,
    implementations with ``foreach=True`` or without pass with float32 parameters; with ``fused=True``, or bfloat16
    parameters, many do not.

    Args:
        optimizer: of torch, or like it; elementwise.

    Raises:
        UnsupportedError: it depends on the shard, or cannot update vectors.

    Example:
        >>> check_canonical_update(torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=False))
    """
    for group in optimizer.param_groups:
        kinds = {(each.dtype, local_part(each).device) for each in group["params"]}
        for dtype, device in sorted(kinds, key=str):
            whole, pieces = (_updated(optimizer, group, dtype, device, sizes) for sizes in ([sum(_SIZES)], _SIZES))
            num_others = int((_bits(whole) != _bits(pieces)).sum())
            if num_others:
                implementation = next((name for name in ("fused", "foreach") if group.get(name)), "")
                asked = f" with {implementation}=True" if implementation else ""
                raise UnsupportedError(
                    f"{type(optimizer).__name__}{asked} updates {dtype} parameters on {device.type} otherwise where "
                    f"a shard's elements fill no whole vector ({num_others} of {whole.numel()} random weights "
                    "differ), so its bits depend on the number of ranks. Take float32 parameters and fused=False"
                )


def _updated(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int],
) -> Tensor:
    """Returns random weights, in pieces of some sizes, after a few steps."""
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = torch.randn(1 + _NUM_STEPS, sum(sizes), generator=generator, device="cpu")
    pieces = [nn.Parameter(each.clone()) for each in weights.to(device, dtype).split(sizes)]
    other = copy.copy(optimizer)
    other.state = defaultdict(dict)
    other.param_groups = [{**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": pieces}]
    for gradient in gradients:
        for piece, part in zip(pieces, gradient.to(device, dtype).split(sizes), strict=True):
            piece.grad = part.clone()
        try:
            other.step()
        except Exception as error:
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot be tried on shards, as it does not update vectors element by "
                f"element: {error}"
            ) from error
    return torch.cat([each.detach() for each in pieces])


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
