"""A model that asks whether it is traced is told that it is not: it takes the path that it takes in eager."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphpasses._torch.module_answers import answers_as_in_eager


@contextmanager
def eager_paths() -> Iterator[None]:
    """Hides from a model, in the block, that it is traced.

    ``torch.compiler.is_compiling()`` and what else torch answers to such questions is False, and no tensor is a
    ``FakeTensor`` for code that imports that name when it runs, as transformers' ``is_tracing`` does. Code that
    imported the class itself before still sees what the tensors are.

    Example:
        >>> def scale():
        ...     return 1 if torch.compiler.is_compiling() else 2
        >>> def loss_fn(model, x):
        ...     return model(x).sum() * scale()
        >>> model = nn.Linear(2, 1)
        >>> step = graphpasses.capture_train_step(loss_fn, model, torch.ones(2, 2))
        >>> bool(step(torch.ones(2, 2)) == loss_fn(model, torch.ones(2, 2)))
        True
    """
    with answers_as_in_eager():
        yield
