"""Reads the two marks of reStructuredText that the docstrings use: roles, and ``::`` before a block of code."""

from __future__ import annotations

import re

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`(?P<short>~?)(?P<target>\.?[\w.]+)`")


def to_markdown(text: str) -> str:
    """Returns the text with roles as code, and with ``::`` as markdown has it."""
    text = ROLE.sub(lambda m: f"`{m['target'].rsplit('.', 1)[-1] if m['short'] else m['target'].lstrip('.')}`", text)
    text = re.sub(r"^\s*::\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    # Sections by the names that griffe knows.
    text = re.sub(r"^Raises\b[^\n]*:$", "Raises:", text, flags=re.MULTILINE)
    return re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


class RstInDocstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
