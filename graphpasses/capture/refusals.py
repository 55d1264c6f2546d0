"""What a captured step would train otherwise than eager: refused by name, before and while it is traced."""

from __future__ import annotations

import inspect
import re
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from graphpasses._torch.ddp import is_replicated
from graphpasses._torch.dynamo import COMPILED_CALL
from graphpasses._torch.fake_mode import is_fake, watched_in_other_threads
from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses._torch.in_place_collectives import AS_IT_LIES, OBJECTS
from graphpasses._torch.module_hooks import is_compiled
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses._torch.step_tracer import trace_as
from graphpasses._torch.storage import memories
from graphpasses._torch.symbols import is_read_number
from graphpasses.capture.traced_lines import is_traced_code, line_of, user_line
from graphpasses.errors import CaptureError, GraphPassesError
from graphpasses.graph.batch import unlike_others
from graphpasses.identity import named_state, walk_modules
from graphpasses.state.model import hook_error, is_trained, trained_state, waiting_hook
from graphpasses.state.slots import FIRST_CALL


def refuse_arguments(*given: Any) -> None:
    """Raises if a loss function, a model and a batch are not what they should be, and says how they are written."""
    loss_fn, model, *batch = given
    misplaced = any(isinstance(each, (nn.Module, torch.optim.Optimizer)) for each in batch)
    if misplaced or not isinstance(model, nn.Module) or not callable(loss_fn):
        raise CaptureError(
            f"capture_train_step was given {', '.join(type(each).__name__ for each in given)}; write "
            "capture_train_step(loss_fn, model, *batch), with an optimizer by name, optimizer=, and other models, "
            "others=(teacher,); loss_fn is called as loss_fn(model, *batch)"
        )


def refuse_model(model: nn.Module) -> None:
    """Raises if a captured step would train a model otherwise than eager does."""
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "torch.autograd.detect_anomaly is on, and a captured step has no autograd that could look for NaNs. Turn "
            "it off; graphpasses.ParityRecorder and `graphpasses locate` name the operator that wrote the first one"
        )
    for fqn, module in walk_modules(model):
        reason = next((why for kind, why in _REFUSED_MODULES.items() if isinstance(module, kind)), None)
        if is_compiled(module):
            reason = "is compiled; capture the module that torch.compile was given, before it is compiled"
        if is_replicated(module):
            reason = (
                "was given to replicate(), which reduces gradients in DistributedDataParallel's hooks, and a "
                "captured step does not run these: each rank would train on its own. Take FSDP2's, of "
                "torch.distributed._composable.replicate_with_fsdp, or fully_shard"
            )
        if fqn == "_checkpoint_wrapped_module":  # the model names what is in it as if it were not there
            reason = "is what checkpoint_wrapper wraps as a whole; wrap modules of it, or give one that holds it all"
        # What is None is no submodule: PEFT's wrapper of tokens has a property where there was one.
        submodules = [(name, each) for name, each in module._modules.items() if each is not None]
        hidden = [name for name, each in submodules if getattr(module, name, None) is not each]
        if hidden and not reason:
            reason = (
                f"has a submodule {hidden[0]!r}, but under this name a method, or else; give the submodule another"
            )
        if reason:
            raise CaptureError(f"{f'module {fqn!r}' if fqn else 'the model'} {reason}")
    check_materialised(model, "before capturing its step")
    for fqn, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise CaptureError(
                f"parameter {fqn!r} is of a lazy module, and has no shape yet; run the model once before"
            )
    for fqn, tensor in named_state(model):
        if (kind := unlike_others(tensor)) is not None:
            raise CaptureError(
                f"parameter or buffer {fqn!r} is a {kind} tensor, which cannot be traced; keep a plain one"
            )
    for fqn, tensor in trained_state(model).items():
        if (kind := waiting_hook(tensor)) is not None:
            raise hook_error(fqn, kind)


class NowTrainedError(CaptureError):
    """``loss_fn`` lets buffers require gradients, whose FQNs it has: the step is to be traced with these."""


def refuse_now_trained(trained: Iterable[tuple[str, torch.Tensor, bool]], parameters: Collection[str]) -> None:
    """Raises if a tensor gets a gradient that got none before ``loss_fn`` ran, or the other way round."""
    changed = {fqn: was for fqn, tensor, was in trained if is_trained(tensor) != was}
    for fqn in changed:
        if fqn in parameters or changed[fqn]:
            raise CaptureError(f"loss_fn sets requires_grad of {fqn!r}; set it before the capture")
    if changed:
        raise NowTrainedError(*changed)


def check_materialised(model: nn.Module, when: str) -> None:
    """Raises if a parameter or buffer is on the meta device; ``when`` says until when it may be."""
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise CaptureError(
                f"parameter or buffer {fqn!r} is on the meta device; materialise the model (to_empty, then "
                f"initialise it) {when}"
            )


# How a module that works in ways that a capture does not see is refused, by its class.
_REFUSED_MODULES: dict[type[nn.Module], str] = {
    nn.parallel.DistributedDataParallel: (
        "is a DistributedDataParallel, which reduces gradients in hooks that a captured step does not run: each rank "
        "would train on its own. Capture its .module, with FSDP2's replicate or fully_shard, or use "
        "torch.compile(model, backend='graphpasses')"
    ),
    nn.DataParallel: "is a DataParallel, which copies itself at each call; capture its .module, one process a device",
    torch.jit.ScriptModule: (
        "was made by torch.jit, whose code a trace does not see; capture the module it was made of"
    ),
    FullyShardedDataParallel: (
        "is a FullyShardedDataParallel (FSDP1), which gathers and reduces in hooks that a captured step does not "
        "run; shard the plain model with fully_shard"
    ),
}


_NO_SYMBOLS = (
    "loss_fn calls at {line} what takes no size that only running tells, as of the rows that a mask selects. Use "
    "another operator, or compute it outside; of an LSTM with projections, turn oneDNN off in both runs, with "
    "torch.backends.mkldnn.set_flags(False)"
)
_SPARSE = (
    "loss_fn makes a sparse tensor of indices and of values that need a gradient, which torch cannot trace "
    "({error}). Make it of a dense one, by to_sparse_csr, or add with index_add"
)
# What torch says of a step that cannot be traced, and how it is refused.
_REFUSED_TRACES = {
    # As torch's C++ says of a size that it takes for a number, and of such an index.
    "symbolic sizes/strides": _NO_SYMBOLS,
    "got SymInt": _NO_SYMBOLS,
    # As the tracer says of a constant; and the constructors of sparse tensors, their backward, and fake kernels.
    "do not have strides": "loss_fn reads a compressed sparse tensor (CSR) at {line} that is no buffer: make it one",
    **dict.fromkeys(("compressed tensor instance", "SparseCooTensor", "SparseTensorImpl", "Sparse CSR"), _SPARSE),
    # As Module.to says of a parameter that is traced.
    "_apply(): Couldn't swap": (
        "forward converts or moves a module, as .to() and .half() do, which replaces its parameters: {error}. Do it "
        "before the step"
    ),
    COMPILED_CALL: (
        "loss_fn calls a function that torch.compile made, at {line}: a captured step holds operators, and the bits "
        "of compiled kernels may be others. Call the function itself, or put both runs under "
        'torch.compiler.set_stance("force_eager")'
    ),
    # As the tracer says of a size that no operator gave.
    "is not tracked with proxy": (
        "loss_fn makes tensors of ragged sizes, as torch.nested's jagged layout, and a graph has no input for such a "
        "size. Pad them, or compute with their values and offsets as plain tensors"
    ),
    # As Module.train says of what is computed of a number that forward changes at each call.
    "training mode is expected to be boolean": (
        "forward gives train() a comparison of a number, at {line}; write train(bool(...)), by which the step decides"
    ),
    # As torch.zeros says.
    "failed to unpack the object": (
        "loss_fn gives a tensor for a size at {line}, and none has a value while a step is traced; write "
        "tensor.item(). Modules of torch do so for a PackedSequence: give them padded tensors"
    ),
    # As the tracer says of the memory that cuDNN gives all weights of a layer.
    "argument of type: <class 'torch.storage.UntypedStorage'>": (
        "loss_fn calls an operator at {line} that makes a tensor of other tensors' memory, as an LSTM, a GRU or an "
        "RNN that runs in cuDNN: turn cuDNN off in both runs, with torch.backends.cudnn.set_flags(False)"
    ),
    OBJECTS: (
        "loss_fn sends objects to other ranks at {line}, as all_gather_object and broadcast_object_list do, and a "
        "captured step would not. Send them before the step, and give them in the batch; return metrics beside the "
        "loss, and send them after the step"
    ),
    AS_IT_LIES: (
        "loss_fn gives a collective at {line} a tensor that is not contiguous, past whose strides gloo moves its "
        "memory; give contiguous ones: torch.empty(x.shape) in place of torch.empty_like(x)"
    ),
    # As Tensor.numpy says of a tensor that is traced.
    ".numpy() is not supported": (
        "loss_fn reads a tensor's values at {line} by NumPy, and there are none while a step is traced. Compute with "
        "torch instead, or outside, and give the result in the batch; or in an operator of your own "
        "(torch.library.custom_op), which the step calls"
    ),
    "type numpy.object_": "loss_fn gives NumPy at {line} a number that the step computes; use Python's math or torch",
    # As an operator says whose C++ writes numbers into a tensor by itself.
    "its data is not allocated yet": (
        "loss_fn calls an operator at {line} that makes a tensor of numbers that it is given, as ctc_loss does where "
        "lengths are numbers: give it tensors"
    ),
    # As the tracer says of a tensor from outside.
    "metadata mutating ops": (
        "loss_fn gives a tensor from outside another shape in place at {line}, as unsqueeze_ and t_ do, and a "
        "captured step would not. Compute with another tensor, e.g. x.unsqueeze(1)"
    ),
    # As torch.utils.checkpoint says.
    "incompatible with .grad()": (
        "loss_fn checkpoints with use_reentrant=True, whose backward cannot be captured; checkpoint with "
        "use_reentrant=False"
    ),
}


@contextmanager
def torchs_errors_named() -> Iterator[None]:
    """Raises what torch raises in the block, a trace, in words of the user's code."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        for text, refusal in _REFUSED_TRACES.items():
            if text in str(error):
                raise CaptureError(refusal.format(error=error, line=line_of(error))) from error
        raise
    except SystemError as error:
        raise CaptureError(
            "a backward that calls backward again cannot be captured where torch moves it to another thread, as it "
            f"does from the sixtieth level on: {error}"
        ) from error


# As Python says of them, and NumPy, which names no type.
_SYMBOLIC = re.compile(r"\bSym(Int|Float|Bool)\b|^ufunc '")


def _has_read_number(error: Exception) -> bool:
    """Whether code that raised has a number of a tensor: Python's library may not say of what kind it was given."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return any(map(is_read_number, frame.f_locals.values()))


@contextmanager
def failures_placed() -> Iterator[None]:
    """Adds to an error of the block, which is traced, that the user's code met fake tensors, and where.

    Refuses what needs the value of a number that is traced, and no formula of it.
    """
    try:
        yield
    except GraphPassesError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and (_SYMBOLIC.search(str(error)) or _has_read_number(error)):
            raise CaptureError(
                f"loss_fn reads a number of a tensor, as by .item(), and at {line_of(error)} makes it a key, formats "
                f"it, or gives it to code in C ({error}); while a step is traced it is symbolic. Return it, and do "
                "so after the step; or write int(n) or float(n), by which the step decides"
            ) from error
        error.add_note(
            f"loss_fn failed at {line_of(error)}, while a capture traced it on fake tensors, which have no values. "
            "If eager runs it with this batch, it gives a tensor where a number stands: write tensor.item(), or "
            "compute it before the step and give it in the batch; or it looks for a parameter among those that "
            "something else holds (by `is`, by `in` or as a key), and others stand for the model's: look for its name"
        )
        raise


@contextmanager
def other_threads_refused() -> Iterator[None]:
    """Raises if the block, a trace, gives its tensors to other threads, whose operators the trace does not see."""
    operators: list[object] = []  # torch may end the process where an error is raised in the thread itself
    cause = None
    try:
        with watched_in_other_threads(operators.append):
            yield
    except Exception as error:
        if not operators:
            raise
        cause = error
    if operators:
        raise CaptureError(
            f"loss_fn, forward or backward calls {operators[0]} in another thread, which a capture does not see; "
            "call it in the thread that runs loss_fn"
        ) from cause


@contextmanager
def assigned_memory(model: nn.Module, batch: Sequence[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Traces what the block assigns to the ``data`` of tensors, which is no operator of a graph.

    Yields those of the model, by FQN. Raises where a tensor of the batch or from outside is given other memory, or
    one that FSDP2 holds.
    """
    names = {id(tensor): fqn for fqn, tensor in (*model.named_parameters(), *model.named_buffers())}
    data: Any = torch.Tensor.data
    given = {id(each) for each in batch}
    thread, assigned = threading.get_ident(), dict[str, torch.Tensor]()
    is_sharded = bool(fsdp_groups(model))

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if threading.get_ident() != thread and not is_fake(tensor):
            data.__set__(tensor, value)  # code that has nothing to do with the step
            return
        if _is_same_view(tensor, value):  # as of .data = tensor.data.to(device), on the device where it is
            return
        name = names.get(id(tensor))
        is_parameter = isinstance(tensor, nn.Parameter)  # of FSDP2, where it has no name
        is_own = not is_sharded if name else is_fake(tensor) and not is_parameter and id(tensor) not in given
        if is_own and not is_tensor_subclass(tensor) and trace_as(tensor, value):
            data.__set__(tensor, value)
            assigned.update({name: tensor} if name else {})
            return
        what = f"{name!r}" if name else f"a tensor of shape {list(tensor.shape)}, {tensor.dtype},"
        raise CaptureError(f"{what} {OTHER_MEMORY}, with .data = ... at {user_line()}{WRITE_IN_PLACE}")

    with mock.patch.object(torch.Tensor, "data", property(data.__get__, assign)):
        yield assigned


def _is_same_view(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    tensors = tensor, value
    places = [(each.dtype, each.shape, each.stride(), each.storage_offset(), memories(each)) for each in tensors]
    return all(each.layout is torch.strided for each in tensors) and places[0] == places[1]


@contextmanager
def texts_refused() -> Iterator[None]:
    """Raises if code of the user's, which is traced, makes the text of what has no value: a tensor, or its number."""

    def refused(make: Any) -> Any:
        def call(value: Any, *args: Any, **kwargs: Any) -> str:
            is_tensor = isinstance(value, torch.Tensor)
            # This frame itself is kept in no variable: it would hold those below it, and their guards, in a circle.
            writer: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
            # What torch writes, as of the arguments of an operator that it tries, nobody reads.
            if not (is_traced_code(writer) and (is_fake(value) if is_tensor else is_read_number(value))):
                return str(make(value, *args, **kwargs))
            what = "a tensor" if is_tensor else "a number of a tensor"
            raise CaptureError(
                f'loss_fn makes the text of {what} at {user_line()}, as print(x) and f"{{x:.3f}}" do, and a captured '
                "step would not. Return it beside the loss, and print it after the step"
            )

        return call

    kinds: tuple[Any, ...] = (torch.Tensor, torch.SymFloat, torch.SymInt, torch.SymBool)
    with ExitStack() as stack:
        for kind, name in [(torch.Tensor, "__format__"), *((each, "__repr__") for each in kinds)]:
            stack.enter_context(mock.patch.object(kind, name, refused(getattr(kind, name))))
        yield


@contextmanager
def gradients_refused(model: nn.Module) -> Iterator[None]:
    """Raises if the block, which is traced, reads or sets ``grad`` of a parameter, or of a tensor from outside."""
    tensors = (*trained_state(model).items(), *model.named_parameters())
    names = {id(tensor): repr(fqn) for fqn, tensor in tensors}
    grad: Any = torch.Tensor.grad
    thread = threading.get_ident()
    inside: list[torch.Tensor] = []  # read now: a mode of functions asks for the same again

    def refused(access: Any, does: str) -> Any:
        def call(tensor: torch.Tensor, *value: torch.Tensor | None) -> Any:
            if inside or threading.get_ident() != thread:
                return access(tensor, *value)
            # Of the step, as x.grad of a penalty.
            is_own = is_fake(tensor) and not (isinstance(tensor, nn.Parameter) or id(tensor) in names)
            # This frame itself is kept in no variable: it would hold the tensor, in a circle.
            reader: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
            is_tracers = reader.f_globals.get("__name__", "").startswith(_READ_GRADIENTS)
            is_moved = reader.f_code.co_name == "_apply"  # a module, as .to() does, which has an error of its own
            if not (is_own or is_tracers or is_moved):
                what = names.get(id(tensor), f"a tensor of shape {[*tensor.shape]}")
                raise CaptureError(
                    f"loss_fn, or a hook, {does} the gradient of {what} (.grad) at {user_line()}, and a captured "
                    "step would not. Do it before or after the step, also zero_grad(), and give what is computed "
                    f"from gradients in the batch{FIRST_CALL}"
                )
            inside.append(tensor)
            try:
                return access(tensor, *value)
            finally:
                inside.pop()

        return call

    instead = property(refused(grad.__get__, "reads"), refused(grad.__set__, "sets"))
    with mock.patch.object(torch.Tensor, "grad", instead):
        yield


# The modules that read gradients of a trace, and FSDP2.
_READ_GRADIENTS = ("graphpasses.", "torch._subclasses.", "torch.distributed.")


OTHER_MEMORY = "gets other memory while loss_fn runs"
WRITE_IN_PLACE = (
    ". A captured step would not follow: it would read and write the old memory. Write the tensor in place, e.g. "
    "with tensor.copy_(...) under torch.no_grad(); if only the first call does so, run it before the capture"
)
