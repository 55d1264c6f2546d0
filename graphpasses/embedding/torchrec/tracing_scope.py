"""What surrounds a call of a compiled TorchRec model, so that Dynamo traces it as one graph, once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from graphpasses._torch.dynamo import InternalTorchDynamoError, change_settings
from graphpasses.embedding.torchrec.ddp_calls import DDP_PATCHES
from graphpasses.embedding.torchrec.patches import TORCHREC_PATCHES
from graphpasses.errors import GraphPassesError


@contextmanager
def tracing_scope() -> Iterator[None]:
    """Sets Dynamo and TorchRec up for whole graphs; after the block everything is as before. It may be nested."""
    with DDP_PATCHES, nullcontext() if sys.modules.get("torchrec") is None else TORCHREC_PATCHES:
        undo_settings = change_settings()
        try:
            yield
        except InternalTorchDynamoError as error:
            # What traced code raises, Dynamo raises in its own words.
            if isinstance(error.__context__, GraphPassesError):
                raise error.__context__ from None
            raise
        finally:
            undo_settings()
