"""Names of TorchRec and FBGEMM that the compiler looks for; nothing is imported for them."""

from __future__ import annotations

import re
from typing import Any

import torch

# The library of FBGEMM's operators.
FBGEMM = "fbgemm"

# The optimizer whose state is a number per row, by module and class.
ROWWISE_ADAGRAD = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"

# A lookup that updates its tables in backward is named by its optimizer. Their update of a row depends only on
# this row, its gradient, its state, and constants.
_FUSED_LOOKUP = "split_embedding_codegen_lookup_{}_function_pt2"
FUSED_OPTIMIZERS = {f"{FBGEMM}.{_FUSED_LOOKUP.format(name)}": name for name in ("sgd", "adagrad", "rowwise_adagrad")}

# Lookups by all optimizers.
UPDATING_LOOKUP = re.compile(rf"{FBGEMM}\.\w+_embedding_codegen_lookup_(?!none_)\w+_function_pt2(\.default)?")

# What AOTAutograd's graphs hold: the check of ids that a lookup makes first, and its forward.
BOUNDS_CHECK = f"{FBGEMM}.bounds_check_indices.default"
TRACED_LOOKUP = re.compile(rf"{FBGEMM}\.split_embedding_(nobag_)?codegen_forward_\w+_pt2_wrapper\.default")

# What cuts a dense tensor: the sizes of the result follow from the values of this argument, and the others' shapes.
SIZED_BY_OFFSETS = {f"{FBGEMM}.dense_to_jagged_forward.default": 1, f"{FBGEMM}.dense_to_jagged.default": 1}


def fused_lookup(optimizer: str) -> Any:
    """Returns the lookup whose backward updates the tables, by FBGEMM's name of the update, once FBGEMM is loaded."""
    return getattr(torch.ops.fbgemm, _FUSED_LOOKUP.format(optimizer)).default


def complete_cumsum() -> Any:
    """Returns the operator that makes offsets of lengths, [n] -> [n + 1], once FBGEMM is loaded."""
    return torch.ops.fbgemm.asynchronous_complete_cumsum.default
