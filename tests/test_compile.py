"""What tools/compile.py compiles for wheels: which modules, that they import in any order, and how a user sees it."""

from __future__ import annotations

import ast
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.cluster import machine

ROOT = Path(__file__).resolve().parent.parent
COMPILED = [
    path
    for package in runpy.run_path(str(ROOT / "tools/compile.py"))["PACKAGES"]
    for path in sorted((ROOT / package).glob("*.py"))
]


def names_for_types_only(tree: ast.Module) -> set[str]:
    """What is imported where `TYPE_CHECKING` holds."""
    guarded = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (each for node in guarded for each in node.body if isinstance(each, ast.ImportFrom))
    return {alias.asname or alias.name for each in imports for alias in each.names}


def field_types(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The class and the type's name of every field that is an object of a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.annotation, ast.Name):
                    yield node.name, field.annotation.id


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_no_field_has_a_type_that_compiled_modules_cannot_import(path: Path) -> None:
    """mypyc evaluates the types of fields of a dataclass at import. A class of a module that is not imported yet is a
    null pointer then, and the process dies."""
    tree = ast.parse(path.read_text())
    unknown = names_for_types_only(tree)
    assert [f"{name}: {kind}" for name, kind in field_types(tree) if kind in unknown] == []


def imported(path: Path) -> Iterator[str]:
    """The modules that a source imports, wherever in it, and the names that it imports from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_build_has_the_packages_whose_types_compiled_modules_need() -> None:
    todo, seen, foreign = list(COMPILED), set(COMPILED), set()
    while todo:
        for name in imported(todo.pop()):
            root = name.partition(".")[0]
            if root not in ("muxserve", "placement"):
                foreign.add(root)
                continue
            place = ROOT / name.replace(".", "/")
            for source in (place / "__init__.py", place.with_suffix(".py")):
                if source.is_file() and source not in seen:
                    seen.add(source)
                    todo.append(source)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    present = {Requirement(each).name for each in project["build-system"]["requires"]}
    for override in project["tool"]["mypy"]["overrides"]:
        if override.get("ignore_missing_imports"):
            present |= {module.partition(".")[0] for module in override["module"]}
    assert foreign - sys.stdlib_module_names <= present


@pytest.mark.parametrize(("origin", "shown"), [("ledger.cpython-311-x86_64-linux-gnu.so", True), ("ledger.py", False)])
def test_the_version_says_whether_it_is_compiled(origin: str, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        pass

    found = Found()
    found.origin = f"/site-packages/muxserve/scheduling/{origin}"  # type: ignore[attr-defined]
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: found)
    assert ("(compiled)" in CliRunner().invoke(app, ["--version"]).stdout) == shown
