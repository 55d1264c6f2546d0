"""``graphpasses passes``: the catalogue, read from the passes themselves."""

from __future__ import annotations

import inspect
import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from graphpasses.commands.exit_codes import EXIT_OK
from graphpasses.errors import UnknownPassError
from graphpasses.text import did_you_mean

if TYPE_CHECKING:
    from graphpasses.passes.runner import GraphPass


def passes(name: Annotated[str, Positional, arg(metavar="NAME")] = "", /, *, json: bool = False) -> int:
    """List the passes: what each does, what it may do to the numbers, and which graphs it takes.

    Exit codes: 0, or 2 if there is no pass of that name.

    Example: graphpasses passes bucket-fsdp-collectives

    Args:
        name: Show everything about this pass.
        json: Print one JSON object instead of a table.
    """
    from graphpasses.terminal import make_console, plain_table

    catalogue = _catalogue()
    if name and name not in catalogue:
        raise UnknownPassError(f"there is no pass {name!r}{did_you_mean(name, catalogue)}; see graphpasses passes")
    chosen = {name: catalogue[name]} if name else catalogue
    if json:
        print(jsonlib.dumps({each: _facts(cls) for each, cls in chosen.items()}))
        return EXIT_OK
    console = make_console()
    if not name:
        every = ((each, _facts(cls)) for each, cls in chosen.items())
        rows = ((each, its["numerics"], ", ".join(its["stages"]), its["summary"]) for each, its in every)
        console.print(plain_table(("pass", "numerics", "graphs", "what it does"), rows))
        return EXIT_OK
    facts = _facts(chosen[name])
    after = f"; runs after {', '.join(facts['runs_after'])}" if facts["runs_after"] else ""
    console.print(f"{name}: {facts['numerics']}; {', '.join(facts['stages'])} graphs{after}\n", markup=False)
    console.print(facts["text"], markup=False)
    return EXIT_OK


def _catalogue() -> dict[str, type[GraphPass]]:
    import graphpasses.passes as package
    from graphpasses.passes.runner import GraphPass

    found = (getattr(package, each) for each in dir(package))
    classes = (each for each in found if inspect.isclass(each) and issubclass(each, GraphPass))
    return {cls.name: cls for cls in sorted(classes, key=lambda cls: cls.name)}


def _facts(cls: type[GraphPass]) -> dict[str, Any]:
    text = inspect.getdoc(cls) or ""
    return {
        "numerics": cls.numerics.value,
        "stages": sorted(stage.value for stage in cls.stages),
        "runs_after": sorted(cls.runs_after),
        "summary": text.splitlines()[0],
        "text": text,
    }
