"""Names of TorchRec and FBGEMM that the compiler looks for without an import of either; and how FBGEMM is loaded."""

from __future__ import annotations

import importlib
import re
import warnings
from typing import Any

import torch

from graphpasses.errors import CaptureError

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
WARNS = 1  # the mode in which the check counts bad ids, ``BoundsCheckMode.WARNING``
TRACED_LOOKUP = re.compile(rf"{FBGEMM}\.split_embedding_(nobag_)?codegen_forward_\w+_pt2_wrapper\.default")

# What cuts a dense tensor: the sizes of the result follow from the values of this argument, and the others' shapes.
SIZED_BY_OFFSETS = {f"{FBGEMM}.dense_to_jagged_forward.default": 1, f"{FBGEMM}.dense_to_jagged.default": 1}


def fused_lookup(optimizer: str) -> Any:
    """Returns the lookup whose backward updates the tables, by FBGEMM's name of the update, once FBGEMM is loaded."""
    return getattr(torch.ops.fbgemm, _FUSED_LOOKUP.format(optimizer)).default


def complete_cumsum() -> Any:
    """Returns the operator that makes offsets of lengths, [n] -> [n + 1], once FBGEMM is loaded."""
    return torch.ops.fbgemm.asynchronous_complete_cumsum.default


def load_fbgemm() -> None:
    """Imports FBGEMM, so that ``torch.ops.fbgemm`` holds every op of a TorchRec training step, or says why not."""
    with warnings.catch_warnings():
        # FBGEMM's import warns of FBGEMM's own code.
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("fbgemm_gpu")
            # The training TBE imports the modules that register the rest.
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        except (ImportError, OSError) as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == "fbgemm_gpu"
            problem = "is not installed" if missing else f"does not load with torch {torch.__version__}: {error}"
            raise CaptureError(
                f"TorchRec models need FBGEMM, which {problem}; install graphpasses[torchrec]"
            ) from error
