"""What torch's optimizers keep to themselves: their hooks, and of which tensors they make lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

# FakeTensor, _foreach_supported_types: an optimizer, and clip_grad_norm_, take lists of tensors at once only if each
# is of a type that is listed; while they are traced, fake tensors count as real ones. Tested: 2.13.
# _global_optimizer_pre_hooks, _global_optimizer_post_hooks: hooks on all optimizers. Tested: 2.13.
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _foreach_supported_types,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from graphpasses._torch.optimizer_in_backward import has_step_hooks


@contextmanager
def lists_take_fakes() -> Iterator[None]:
    """In the block, optimizers make lists of fake tensors where they make lists of tensors."""
    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)


def runs_hooks(optimizer: Optimizer) -> bool:
    """Whether something else than the optimizer's own step runs when it is called.

    That is a hook on this optimizer, one on all, or another ``step`` that was put over its own; what a scheduler of
    learning rates puts there only notes that it was called.
    """
    step = vars(optimizer).get("step")
    return (
        has_step_hooks(optimizer)
        or bool(_global_optimizer_pre_hooks)
        or bool(_global_optimizer_post_hooks)
        or (step is not None and not getattr(step, "_wrapped_by_lr_sched", False))
    )


def note_step(optimizer: Optimizer) -> None:
    """Tells schedulers of learning rates, which warn otherwise, that the optimizer has made a step."""
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def shadow_of(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer with the same attributes, without hooks, and without groups and state.

    The optimizer's own ``__init__`` would ask its parameters for what fake ones do not have.
    """
    shadow: Optimizer = object.__new__(type(optimizer))
    vars(shadow).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    shadow.param_groups, shadow.state = [], defaultdict(dict)
    return shadow
