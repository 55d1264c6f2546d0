"""What importing graphpasses loads, and where it touches torch's private parts."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import graphpasses
import graphpasses.parity

ROOT = Path(next(iter(graphpasses.__path__)))
OPTIONAL = ("torchtitan", "torchrec", "fbgemm_gpu", "rich", "tyro")


@pytest.mark.parametrize(
    "modules",
    [
        ["graphpasses"],
        [
            "graphpasses.passes",
            "graphpasses.capture",
            "graphpasses.fsdp",
            "graphpasses.fsdp.graph_layout",
            "graphpasses.passes.runner",
            "graphpasses.parity",
            "graphpasses.simulate",
        ],
    ],
)
def test_core_imports_torch_alone(modules: list[str]) -> None:
    code = (
        f"import sys; import {', '.join(modules)}; "
        f"print([name for name in {OPTIONAL} if name in sys.modules], 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["[]", str(modules != ["graphpasses"])]


@pytest.mark.parametrize("package", [graphpasses, graphpasses.parity])
def test_every_public_name_is_there(package: ModuleType) -> None:
    assert len(package.__all__) > 10
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'graphpasses' has no attribute 'nothing'"):
        graphpasses.nothing  # noqa: B018


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def private_uses(tree: ast.AST, package: str = "torch") -> Iterator[tuple[int, str]]:
    """Yields imports and attributes of torch with a private part; ``torch.ops`` holds operators, not API."""
    # What a module calls torch or a part of it: `import torch.distributed as dist`, `from torch import fx`.
    names = {package: package}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    names[alias.asname or package] = alias.name if alias.asname else package
                    yield from ((node.lineno, alias.name) for part in alias.name.split(".") if is_private(part))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = path
                if any(is_private(part) for part in path.split(".")):
                    yield node.lineno, path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = dotted(node, names)
            if path is not None and is_private(path.rsplit(".", 1)[1]) and not path.startswith("torch.ops."):
                yield node.lineno, path


def dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return None if base is None else f"{base}.{node.attr}"
    return None


def test_scan_finds_private_uses() -> None:
    code = """
import torch, torch._dynamo
import torch.distributed as dist
from torch import fx
from torch.utils import _pytree
from torch.testing._internal.common_utils import run_tests
torch._C._jit; torch.ops._c10d_functional.all_reduce; dist._group; fx.Graph; torch.__version__
"""
    assert sorted({path for _, path in private_uses(ast.parse(code))}) == [
        "torch._C",
        "torch._C._jit",
        "torch._dynamo",
        "torch.distributed._group",
        "torch.testing._internal.common_utils.run_tests",
        "torch.utils._pytree",
    ]


def uses_outside(package: str, allowed: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if not path.is_relative_to(ROOT / allowed)
        for line, name in private_uses(ast.parse(path.read_text()), package)
    ]


def test_private_torch_is_used_in_one_folder() -> None:
    assert uses_outside("torch", "_torch") == []


def unlisted(path: Path, readme: str) -> list[str]:
    """Returns what a file uses of torch's private parts that no row of the README's table has beside its name.

    A row names what is used, or the module or class that it is part of.
    """
    rows = [line for line in readme.splitlines() if line.startswith("|") and f"`{path.name}`" in line]
    tree = ast.parse(path.read_text())
    names = {name for find in (private_uses, private_attributes) for _, name in find(tree)}
    return [
        f"{path.name}: {name}"
        for name in sorted(names - {"sys._getframe"})  # Python's
        if not name.startswith("_aten.")
        and not any(word in row for row in rows for word in name.removeprefix("torch.").split(".")[-2:])
    ]


def test_private_torch_is_listed() -> None:
    readme = (ROOT / "_torch/README.md").read_text()
    found = [name for path in sorted((ROOT / "_torch").glob("*.py")) for name in unlisted(path, readme)]
    assert found == []
    nothing = [name for path in sorted((ROOT / "_torch").glob("*.py")) for name in unlisted(path, "")]
    assert "fake_mode.py: torch._prims_common" in nothing
    other = readme.replace("torch._prims_common", "torch.")
    assert unlisted(ROOT / "_torch/fake_mode.py", other) == ["fake_mode.py: torch._prims_common"]


# The children and tensors of a module, which SimpleFSDP's read-only properties hide; a named tuple's public methods.
PUBLIC_ENOUGH = {"_modules", "_parameters", "_buffers", "_make", "_replace"}
# Shims: each lists or patches what it uses.
SHIMS = ("_torch", "_torchtitan.py", "embedding/torchrec")


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields attributes with one leading underscore, of anything but ``self``, ``cls`` and operators."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name):
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[value, ast.Constant(value=str(name)), *_],
            ):
                pass
            case _:
                continue
        owner = ast.unparse(value)
        is_own = owner in ("self", "cls") or owner.split(".")[0] == "aten" or f"{owner}.".startswith("torch.ops.")
        if is_private(name) and not is_own and name not in PUBLIC_ENOUGH:
            yield node.lineno, f"{owner}.{name}"


def test_scan_finds_private_attributes() -> None:
    code = """
self._own; cls._own; aten._to_copy; torch.ops.aten._to_copy.default; module._modules; module.__class__
op._schema; getattr(compiled, "_orig_mod", None); node.target._schema.arguments; self.child._hidden
"""
    assert sorted({name for _, name in private_attributes(ast.parse(code))}) == [
        "compiled._orig_mod",
        "node.target._schema",
        "op._schema",
        "self.child._hidden",
    ]


def test_private_attributes_are_used_in_shims_alone() -> None:
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if not any(path.is_relative_to(ROOT / shim) for shim in SHIMS)
        for line, name in private_attributes(ast.parse(path.read_text()))
    ]
    assert uses == []


# How TorchRec's users ask for fused updates, and Dynamo's settings: torch has no public names for them.
NO_PUBLIC_NAME = {"torch.distributed.optim._apply_optimizer_in_backward", "torch._dynamo"}


def examples(path: Path) -> Iterator[str]:
    """Yields the code of each docstring's examples, after the names that conftest.py gives them."""
    parse, documented = doctest.DocTestParser().get_examples, (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, documented) and (found := parse(ast.get_docstring(node) or "")):
            names = "import torch, torch.distributed as dist\nfrom torch import nn\n"
            yield names + "".join(example.source for example in found)


def test_examples_in_docstrings_use_public_torch() -> None:
    paths = [path for path in sorted(ROOT.rglob("*.py")) if not path.is_relative_to(ROOT / "_torch")]
    trees = [(path.name, ast.parse(code)) for path in paths for code in examples(path)]
    assert len(trees) > 80
    uses = [
        f"{name}: {use}"
        for name, tree in trees
        for find in (private_uses, private_attributes)
        for _, use in find(tree)
        if use not in NO_PUBLIC_NAME
    ]
    assert uses == []
    inside = [use for code in examples(ROOT / "_torch/module_answers.py") for _, use in private_uses(ast.parse(code))]
    assert inside == ["torch._subclasses.FakeTensor"]  # the control


def test_private_torchtitan_is_used_in_one_file() -> None:
    assert uses_outside("torchtitan", "_torchtitan.py") == []
    assert uses_outside("torchtitan", "_torch") != []


COMPILER = ("analysis", "capture", "embedding", "fbgemm", "fsdp", "graph", "ops", "passes")
# Whose reference calls FBGEMM's operators.
NAMES_FBGEMM = ("embedding/torchrec", "fbgemm", "ops/permute_batches.py", "ops/update_rows.py")


def torchrec_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields operators of TorchRec and FBGEMM, and strings that name their parts; docstrings may."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="fbgemm" | "torchrec", value=ast.Attribute(attr="ops")):
                yield node.lineno, ast.unparse(node)
            case ast.Constant(value=str(text)) if id(node) not in docs:
                if re.search(r"(torchrec|fbgemm)[.:]|^fbgemm$|split_embedding_|_1d_cat_2d|_input_dist\b", text):
                    yield node.lineno, text


def test_torchrecs_names_live_in_one_folder() -> None:
    found = torchrec_names(ast.parse("torch.ops.fbgemm.x; y = 'fbgemm.lookup'; 'a docstring of fbgemm.lookup'"))
    assert {name for _, name in found} == {"torch.ops.fbgemm", "fbgemm.lookup"}
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for package in COMPILER
        for path in sorted((ROOT / package).rglob("*.py"))
        if not any(path.is_relative_to(ROOT / place) for place in NAMES_FBGEMM)
        for line, name in torchrec_names(ast.parse(path.read_text()))
    ]
    assert uses == []
