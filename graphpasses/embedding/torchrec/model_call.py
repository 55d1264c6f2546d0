"""What happens around each call of a compiled model of TorchRec, or with DistributedDataParallel in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from graphpasses._torch.dynamo import FailOnRecompileLimitHit, InternalTorchDynamoError, change_settings
from graphpasses.embedding.torchrec.ddp_calls import DDP_PATCHES, DDPCalls
from graphpasses.embedding.torchrec.input_dists import checks_inputs, needs_eager_call
from graphpasses.embedding.torchrec.inputs import check_inputs, prepare_inputs
from graphpasses.embedding.torchrec.patches import TORCHREC_PATCHES
from graphpasses.errors import AgreementError, GraphPassesError
from graphpasses.fbgemm.names import load_fbgemm


class ModelCall:
    """Calls a compiled TorchRec model in the scope in which Dynamo can trace it.

    Calls that decide something for the later ones run as in eager: those from which DistributedDataParallel takes the
    order of its buckets, and the first of a model with modules whose input dists nothing else can make.
    """

    def __init__(self, modules: Sequence[nn.Module], compiled: Callable[..., Any], eager: Callable[..., Any]) -> None:
        self._modules, self._compiled, self._eager = modules, compiled, eager
        self._ddp: DDPCalls | None = None

    @property
    def ddp(self) -> DDPCalls:
        """What the model's DistributedDataParallel modules do."""
        if self._ddp is None:
            self._ddp = DDPCalls(self._modules)
        return self._ddp

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the compiled function; the first call refuses what it cannot compile."""
        is_first = self._ddp is None
        if is_first and "torchrec" in sys.modules:
            load_fbgemm()
        if self.ddp.needs_eager_step() or (is_first and needs_eager_call(self._modules)):
            with tracing_scope(), self.ddp.call():
                return self._eager(*args, **kwargs)
        if is_first and checks_inputs(self._modules):
            check_inputs(args, kwargs)
        new_args, new_kwargs, write_back = prepare_inputs(args, kwargs)
        with tracing_scope(), self.ddp.call() as call:
            call.begin()
            outputs = self._compiled(*new_args, **new_kwargs)
        write_back()
        return call.end(outputs)


@contextmanager
def tracing_scope() -> Iterator[None]:
    """Sets Dynamo and TorchRec up for whole graphs; after the block everything is as before. It may be nested."""
    with DDP_PATCHES, nullcontext() if sys.modules.get("torchrec") is None else TORCHREC_PATCHES:
        undo_settings = change_settings()
        try:
            yield
        except FailOnRecompileLimitHit as error:
            raise AgreementError(
                "Dynamo has compiled a function of the model as often as it may (recompile_limit), and this rank "
                "alone would run it eagerly now, and launch other collectives than the others. "
                f"TORCH_LOGS=recompiles says why it does so. {error.__cause__}"
            ) from error
        except InternalTorchDynamoError as error:
            # What traced code raises, Dynamo raises in its own words.
            if isinstance(error.__context__, GraphPassesError):
                raise error.__context__ from None
            raise
        finally:
            undo_settings()
