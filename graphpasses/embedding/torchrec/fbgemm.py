"""Loads FBGEMM, whose import registers its operators."""

import importlib
import warnings

import torch

from graphpasses.errors import CaptureError


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
