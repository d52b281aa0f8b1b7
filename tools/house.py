"""How large the house is against how large it should be: a table, for every run of the tests. Never fails.

.venv/bin/python tools/house.py
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("muxserve", "placement")
# Classes that describe a model, and those that learn how long something takes.
DESCRIPTIONS = frozenset(
    {"Model", "ModelSpec", "ModelDemand", "Demand", "Wanted", "ServedModel", "FleetModel", "SimModel", "ModelProfile"}
)
LEARNERS = frozenset({"PhaseCorrection", "WakePace"})
MANY_ARGUMENTS = 9
MANY_FIELDS = 20


class Row(NamedTuple):
    """A count, and what it should be at most."""

    name: str
    value: int
    target: int


class House:
    """The checkout at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = [path for package in SOURCES for path in sorted((root / package).rglob("*.py"))]

    def rows(self) -> Iterator[Row]:
        """Everything that is counted."""
        yield Row("lines of muxserve and placement", lines(self.files), 75_000)
        yield Row("files of muxserve and placement", len(self.files), 410)
        yield Row("lines of tests", lines((self.root / "tests").rglob("*.py")), 66_000)
        yield Row("lines of docs", lines((self.root / "docs").rglob("*.md")), 7_500)
        yield Row(f"calls with {MANY_ARGUMENTS} or more arguments", self.long_calls(), 40)
        yield Row("callables that constructors of cluster take", self.callables("muxserve/cluster"), 10)
        yield Row("circles of files", len(circles(self.imports())), 0)
        yield Row(f"classes of more than {MANY_FIELDS} fields", self.wide_classes(), 12)
        yield Row("keys of the fleet file", self.fleet_keys(), 109)
        for command in ("plan", "simulate"):
            yield Row(f"options of {command}", options(command), 20)
        yield Row("descriptions of a model", len(DESCRIPTIONS & set(self.classes)), 6)
        yield Row("learners of time", len(LEARNERS & set(self.classes)), 4)
        yield Row("names of classes in two files", len(self.double_names()), 0)

    @cached_property
    def trees(self) -> Mapping[Path, ast.Module]:
        """The sources, by file."""
        return {path: ast.parse(path.read_bytes()) for path in self.files}

    @cached_property
    def classes(self) -> Mapping[str, list[Path]]:
        """By the name of a class: the files that have one."""
        found: dict[str, list[Path]] = defaultdict(list)
        for path, tree in self.trees.items():
            for name in dict.fromkeys(node.name for node in tree.body if isinstance(node, ast.ClassDef)):
                found[name].append(path)
        return found

    def long_calls(self) -> int:
        """Calls with many arguments."""
        return sum(
            len(node.args) + len(node.keywords) >= MANY_ARGUMENTS
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        )

    def callables(self, package: str) -> int:
        """Parameters of constructors that are functions, in a package."""
        trees = [tree for path, tree in self.trees.items() if path.is_relative_to(self.root / package)]
        names = {"Callable"}
        for tree in self.trees.values():  # names of such types
            names |= {name for name, value in _assigned(tree) if ast.unparse(value).startswith("Callable[")}
        return sum(
            _says(annotation, names)
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for annotation in _taken(node)
        )

    def wide_classes(self) -> int:
        """Classes of many fields."""
        return sum(
            len(fields(node)) > MANY_FIELDS
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        )

    def fleet_keys(self) -> int:
        """Keys that a fleet file can have."""
        schema = json.loads((self.root / "configs/fleet.schema.json").read_text())
        return sum(len(each.get("properties", ())) for each in (schema, *schema.get("$defs", {}).values()))

    def double_names(self) -> list[str]:
        """Names of classes that several files have; the CPU's and the GPU's engine may have the same."""
        found = []
        for name, paths in self.classes.items():
            places = Counter(str(path).replace("/engine/cuda/", "/engine/cpu/") for path in paths)
            if len(places) > 1 and not name.startswith("_"):
                found.append(name)
        return sorted(found)

    def imports(self) -> dict[str, set[str]]:
        """By file: the files that it imports."""
        modules = {self._module(path): str(path.relative_to(self.root)) for path in self.files}
        found: dict[str, set[str]] = {name: set() for name in modules.values()}
        for path, tree in self.trees.items():
            own = modules[self._module(path)]
            found[own] = {modules[name] for name in _imported(tree) if name in modules} - {own}
        return found

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def lines(paths: Iterable[Path]) -> int:
    """Lines of files."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def options(command: str) -> int:
    """Options of a command, `--help` left out."""
    import typer

    from muxserve.cli.app import app

    group = typer.main.get_command(app)
    parameters = group.commands[command].params  # type: ignore[attr-defined]
    return sum(each.param_type_name == "option" and each.name != "help" for each in parameters)


def fields(node: ast.ClassDef) -> set[str]:
    """What objects of a class have: declared fields, and what its constructor sets."""
    found = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for each in ast.walk(method):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and _is(each.value, "self"):
                    found.add(each.attr)
    return found


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of files that all import each other, directly or not (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(imports):
        if name not in order:
            visit(name)
    return found


def table(rows: Iterable[Row]) -> str:
    """A line for each count; those above their target have a mark."""
    shown = list(rows)
    width = max(len(row.name) for row in shown)
    return "\n".join(
        f"{row.name:{width}}  {row.value:>7,} of {row.target:>7,}{'  above' if row.value > row.target else ''}"
        for row in shown
    )


def _imported(tree: ast.AST) -> Iterator[str]:
    """Modules that a file imports, for types as well; not those of functions, which are imported when these run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imported(node)


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _taken(node: ast.ClassDef) -> Iterator[ast.expr]:
    """The types of what a class's constructor takes."""
    own = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    for method in own:
        arguments = method.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if each.annotation is not None:
                yield each.annotation
    if not own:
        yield from (each.annotation for each in node.body if isinstance(each, ast.AnnAssign))


def _says(annotation: ast.expr, names: set[str]) -> bool:
    return any(_is(node, *names) for node in ast.walk(annotation))


def _is(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


if __name__ == "__main__":
    print(table(House(ROOT).rows()))
