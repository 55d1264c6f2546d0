"""What a graph of a training step is a part of, and what its flat inputs and outputs are."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Stage(enum.Enum):
    """The part of a training step that a graph holds.

    A captured step is one ``STEP`` graph. Under ``torch.compile`` a model shows four: the ``DYNAMO`` as Dynamo traced
    it (torch-level calls, autograd still to come), the ``JOINT`` graph of forward and backward (functional ATen
    operators), and the ``FORWARD`` and ``BACKWARD`` graphs that the joint one is split into. Without gradients the
    joint graph has no backward part, and the forward graph is the joint one. A pass that talks to other ranks accepts
    no later stage than ``JOINT``: the later ones a compiler may take from its cache, on one rank and not on another.
    """

    STEP = "step"
    DYNAMO = "dynamo"
    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"


class InputKind(enum.Enum):
    """What a flat graph input is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    TANGENT = "tangent"  # the gradient of an output of the forward pass: there is none before that is over
    VALUE = "value"  # anything else: a module's unregistered tensor, a size, what forward saved
    OPTIMIZER_STATE = "optimizer state"  # a tensor that the optimizer keeps for a parameter
    HYPERPARAMETER = "hyperparameter"  # of a group of the optimizer: a number, or a tensor
    GRADIENT = "gradient"  # what the graph of an update alone reads
    UNREDUCED = "unreduced gradient"  # what FSDP2 keeps of earlier microbatches, and a step reduces with its own


class OutputKind(enum.Enum):
    """What a flat graph output is."""

    LOSS = "loss"
    GRADIENT = "gradient"
    LEFT = "left tensor"  # what a step leaves in a module: a buffer that forward replaces, an attribute that it sets
    MEMORY = "memory"  # what forward assigns to the ``data`` of a parameter or a buffer
    RETURNED = "returned value"  # what ``loss_fn`` returns beside the loss
    VALUE = "value"  # anything else: what the model returns, what backward needs


@dataclass(frozen=True)
class GraphInput:
    """What one placeholder carries."""

    kind: InputKind
    # FQN under which the tracer saw the tensor (an alias, where tensors are tied), the leaf's path in the
    # batch, e.g. ``batch[0]['tokens']``, or the best description of where the value comes from.
    fqn: str
    # ``""`` for the tensor itself; for a DTensor, the part that this placeholder carries: ``"_local_tensor"``
    # or ``"device_mesh"``.
    attr: str = ""
    # The name of a parameter's optimizer state, e.g. ``"exp_avg"``, or of a hyperparameter, e.g. ``"betas[0]"``.
    state: str = ""

    @property
    def name(self) -> str:
        """A readable name, e.g. ``parameter 'weight'`` or ``optimizer state 'exp_avg' of 'weight'``."""
        return f"{self.kind.value} {f'{self.state!r} of ' if self.state else ''}{self.fqn!r}"

    @property
    def group(self) -> int:
        """Of a hyperparameter the index of its group in the optimizer."""
        return int(self.fqn.removeprefix("group "))

    @property
    def is_state(self) -> bool:
        """Whether the placeholder carries a parameter or buffer, or a part of one."""
        return self.kind in (InputKind.PARAMETER, InputKind.BUFFER)

    @property
    def is_tensor(self) -> bool:
        """Whether the placeholder carries tensor data (not a device mesh)."""
        return self.attr in ("", "_local_tensor")


@dataclass(frozen=True)
class GraphOutput:
    """What one flat output carries: the loss, the gradient of ``fqn``, what is left in ``fqn``, or another value."""

    kind: OutputKind
    fqn: str = ""  # FQN of the parameter whose gradient it is, as the tracer saw it; empty for the loss
    attr: str = ""  # as in :class:`GraphInput`
    # Whether the graph itself updates the parameter with it: a step that runs does not return it.
    is_applied: bool = False

    @property
    def is_gradient(self) -> bool:
        """Whether this slot carries gradient data (not a device mesh)."""
        return self.kind is OutputKind.GRADIENT and self.attr in ("", "_local_tensor")

    @property
    def is_loss(self) -> bool:
        """Whether this slot carries the loss's data (not its device mesh)."""
        return self.kind is OutputKind.LOSS and self.attr in ("", "_local_tensor")
