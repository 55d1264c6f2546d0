"""What stands in an attribute in which eager's forward keeps a tensor, once a captured step has run in its place."""

from __future__ import annotations

from typing import Any, NoReturn

from graphpasses.errors import UnsupportedError


class Uncomputed:
    """Says at any use that a captured step keeps no tensor there. ``path`` is the attribute's FQN.

    Example:
        >>> Uncomputed("attention.scores").mean()
        Traceback (most recent call last):
        graphpasses.errors.UnsupportedError: forward keeps a tensor in the attribute 'attention.scores', and a ...
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<{self._path!r} is not kept by a captured step>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Uncomputed, (self._path,)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        next(each for each in given if isinstance(each, Uncomputed))._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            f"forward keeps a tensor in the attribute {self._path!r}, and a captured step does not. Run forward "
            "eagerly for it, or compute it from the batch after the step"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = _refuse
