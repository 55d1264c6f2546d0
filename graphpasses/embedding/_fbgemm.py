"""Loads FBGEMM, whose import registers its operators."""

import importlib
import warnings

from graphpasses.errors import CaptureError

__all__ = ["load_fbgemm"]

# The training TBE; it imports the modules that register every op of a TorchRec training step.
_MODULE = "fbgemm_gpu.split_table_batched_embeddings_ops_training"


def load_fbgemm() -> None:
    """Imports FBGEMM, so that ``torch.ops.fbgemm`` holds every op of a TorchRec training step.

    Raises:
        CaptureError: FBGEMM is not installed.

    Example:
        >>> load_fbgemm()  # doctest: +SKIP
        >>> torch.ops.fbgemm.permute_2D_sparse_data  # doctest: +SKIP
    """
    with warnings.catch_warnings():
        # FBGEMM's import warns of what FBGEMM itself does: deprecated decorators, private registrations.
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(_MODULE)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "fbgemm_gpu":
                raise
            raise CaptureError(
                "TorchRec models need FBGEMM, which is not installed: pip install 'graphpasses[torchrec]'"
            ) from error
