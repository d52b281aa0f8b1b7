"""Python packages as their sources have them, read without importing anything: names, classes, signatures, bodies."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from muxserve.vllm.since import numbers
from muxserve.vllm.syntax import parse

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Stands for what a module has of packages whose sources are not looked at.
OUTSIDE = ast.Pass()


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes from its callers; of methods without the object or class.

    Attributes:
        positional: names that may be given by position, and whether each must be given.
        keywords: the same of names that can only be given by name.
        more: whether it takes any number of positional arguments, and any keywords.
    """

    positional: tuple[tuple[str, bool], ...] = ()
    keywords: tuple[tuple[str, bool], ...] = ()
    more: tuple[bool, bool] = (False, False)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.positional + self.keywords}

    def refuses(self, count: int, names: Iterable[str], some: bool = False) -> str:
        """Why a call cannot be, in words; empty if it can be.

        Args:
            count: number of positional arguments.
            names: the keywords.
            some: whether the call passes on further arguments that the source does not show.
        """
        names = set(names)
        if count > len(self.positional) and not self.more[0]:
            return f"takes {len(self.positional)} positional arguments, not {count}"
        unknown = sorted(names - self.names)
        if unknown and not self.more[1]:
            return f"has no {', '.join(unknown)}"
        given = names | {name for name, _ in self.positional[:count]}
        missing = [name for name, must in self.positional + self.keywords if must and name not in given]
        return f"also needs {', '.join(missing)}" if missing and not some else ""

    def refuses_calls_of(self, other: Signature) -> str:
        """Why a function with this signature cannot take the place of one with the `other`; empty if it can."""
        count = len(other.positional)
        # What ours takes as keywords it may get by name.
        if count > len(self.positional) and not any(self.more):
            return f"is called with {count} positional arguments, and ours takes {len(self.positional)}"
        unknown = sorted({name for name, _ in other.keywords} - self.names)
        if unknown and not self.more[1]:
            return f"is called with {', '.join(unknown)}, which ours does not take"
        musts = {name for name, must in other.positional + other.keywords if must}
        extra = [name for name, must in self.positional[count:] + self.keywords if must and name not in musts]
        return f"is called without {', '.join(extra)}, which ours needs" if extra else ""


@dataclass(frozen=True)
class Definition:
    """A definition: the module it stands in, its path there, and its node; `owner` is the class of a method."""

    module: Module
    path: str
    node: ast.AST
    owner: Definition | None = None

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.path}"

    @property
    def lines(self) -> str:
        node = self.node
        assert isinstance(node, ast.stmt)
        return f"lines {node.lineno} to {node.end_lineno} of {self.module.file}"

    def digest(self) -> str:
        """A digest of a function's source text without comments and docstring. Syntax trees, and the text that Python
        writes of them, differ between its versions."""
        node = self.node
        assert isinstance(node, Function)
        skipped: set[int] = set()
        if ast.get_docstring(node) is not None:
            skipped = set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        text = [
            line.strip()
            for number, line in enumerate(self.module.lines[node.lineno - 1 : node.end_lineno], node.lineno)
            if number not in skipped and line.strip() and not line.lstrip().startswith("#")
        ]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:12]


class Active(ast.NodeTransformer):
    """Leaves of `if since("0.33.0"): ... else: ...` the branch that a version of vLLM takes."""

    def __init__(self, version: str) -> None:
        self._version = version

    def _taken(self, test: ast.expr) -> bool | None:
        match test:
            case ast.Call(ast.Name("since"), [ast.Constant(str(first))]):
                return numbers(self._version) >= numbers(first)
        return None

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        taken = self._taken(node.test)
        return node if taken is None else (node.body if taken else node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        taken = self._taken(node.test)
        return node if taken is None else (node.body if taken else node.orelse)


@dataclass(eq=False)
class Module:
    """A source file: its definitions and what it imports, by name."""

    name: str
    file: str
    lines: list[str]
    tree: ast.Module
    is_package: bool
    names: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)  # module and name in it; all of a module: ""
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for statement in _statements(self.tree.body):
            for name in _defined(statement):
                self.names.setdefault(name, statement)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append(source)
                    else:
                        self.imports.setdefault(alias.asname or alias.name, (source, alias.name))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    name, whole = (alias.asname, alias.name) if alias.asname else (first, first)
                    self.imports.setdefault(name, (whole, ""))

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


@dataclass(eq=False)
class Sources:
    """Packages by name, each in its folder. Of `if since(...)` in them the branch for `version` counts."""

    folders: Mapping[str, Path]
    version: str

    def __post_init__(self) -> None:
        self.module = cache(self._module)
        self.ancestors = cache(self._ancestors)

    def _module(self, name: str) -> Module | None:
        package, _, rest = name.partition(".")
        folder = self.folders.get(package)
        if folder is None:
            return None
        place = folder.joinpath(*rest.split(".")) if rest else folder
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.is_file():
                tree = Active(self.version).visit(parse(path))
                file = str(path.relative_to(folder.parent))
                return Module(name, file, path.read_text().splitlines(), tree, path.name == "__init__.py")
        return None

    def modules(self, package: str) -> Iterator[Module]:
        """Every module of a package or of a package in it."""
        first, _, rest = package.partition(".")
        folder = self.folders[first]
        for path in sorted(folder.joinpath(*rest.split(".")).rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found = self.module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            if found is not None:
                yield found

    def find(self, module_name: str, path: str, depth: int = 0) -> Definition | None:
        """What `path` means in a module, through what it imports and through base classes; None if nothing does."""
        module = self.module(module_name)
        if module is None or depth > 20:
            return None
        first, _, rest = path.partition(".")
        found = self._in_module(module, first, depth)
        return self.member(found, rest) if found is not None and rest else found

    def _in_module(self, module: Module, name: str, depth: int) -> Definition | None:
        node = module.names.get(name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name | ast.Attribute):
            other = self.resolve(module, node.value, depth + 1)
            if other is not None and other.name != f"{module.name}.{name}":
                return other
        if node is not None:
            return Definition(module, name, node)
        if name in module.imports:
            source, original = module.imports[name]
            if source.partition(".")[0] not in self.folders:
                return Definition(module, name, OUTSIDE)
            if original:
                found = self.find(source, original, depth + 1)
                if found is not None:
                    return found
                source = f"{source}.{original}"
            whole = self.module(source)
            return None if whole is None else Definition(whole, "", whole.tree)
        for source in module.stars:
            found = self.find(source, name, depth + 1)
            if found is not None:
                return found
        submodule = self.module(f"{module.name}.{name}")
        return None if submodule is None else Definition(submodule, "", submodule.tree)

    def resolve(self, module: Module, node: ast.expr, depth: int = 0) -> Definition | None:
        """What an expression of names and dots means at the top of a module."""
        match node:
            case ast.Name(name):
                return self._in_module(module, name, depth) if depth <= 20 else None
            case ast.Attribute(value, name):
                found = self.resolve(module, value, depth)
                return None if found is None else self.member(found, name)
            case ast.Subscript(value):  # of generic classes
                return self.resolve(module, value, depth)
            case ast.Constant(str(text)):
                try:
                    return self.resolve(module, ast.parse(text, mode="eval").body, depth)
                except SyntaxError:
                    return None
        return None

    def member(self, found: Definition, path: str) -> Definition | None:
        """An attribute of a module or class, also an inherited one and one that methods give to objects."""
        if found.node is OUTSIDE:
            return found
        first, _, rest = path.partition(".")
        if isinstance(found.node, ast.Assign | ast.AnnAssign) and isinstance(found.node.value, ast.Call):
            made = self.resolve(found.module, found.node.value.func)  # an object of a class
            return None if made is None else self.member(made, path)
        if isinstance(found.node, ast.Module):
            inner = self.find(found.module.name, first)
        else:
            inner = next((each for base in self.ancestors(found) if (each := own(base, first))), None)
        return self.member(inner, rest) if inner is not None and rest else inner

    def _ancestors(self, cls: Definition) -> tuple[Definition, ...]:
        """The class and its bases in the order in which names are looked for; those that no source has are left out."""
        if not isinstance(cls.node, ast.ClassDef):
            return ()
        line = [cls]
        for base in cls.node.bases:
            found = self.resolve(cls.module, base)
            if found is not None and found.name != cls.name:
                line += self.ancestors(found)
        # A base that several classes have comes after all of them.
        last = {each.name: number for number, each in enumerate(line)}
        return tuple(each for number, each in enumerate(line) if last[each.name] == number)

    def signature(self, found: Definition) -> Signature | None:
        """The signature of a function, a method or a class's constructor; None where the source does not tell."""
        node = found.node
        if isinstance(node, Function):
            static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in node.decorator_list)
            return _signature(node, bound=found.owner is not None and not static)
        if not isinstance(node, ast.ClassDef):
            return None
        line = self.ancestors(found)
        for base in line:
            made = own(base, "__init__")
            if made is not None:
                return self.signature(made)
        fields = [each for base in reversed(line) for each in _fields(base)]
        return Signature(tuple(dict(fields).items())) if fields else None


def own(cls: Definition, name: str) -> Definition | None:
    """What the class itself has under a name: a method, an attribute, or one that its methods give to objects."""
    node = _members(cls.node).get(name) if isinstance(cls.node, ast.ClassDef) else None
    return None if node is None else Definition(cls.module, f"{cls.path}.{name}", node, cls)


@cache
def _members(cls: ast.ClassDef) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for statement in _statements(cls.body):
        for name in _defined(statement):
            found.setdefault(name, statement)
    for method in [node for node in _statements(cls.body) if isinstance(node, Function)]:
        if not method.args.args:
            continue
        this = method.args.args[0].arg
        for node in ast.walk(method):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign):
                for target in [inner for outer in targets for inner in getattr(outer, "elts", [outer])]:
                    match target:
                        case ast.Attribute(ast.Name(owner), name) if owner == this:
                            found.setdefault(name, node)
    return found


def form(found: Definition) -> str:
    """How a class's attribute is declared: by its annotation, else by the kind of value that it is given first."""
    node = found.node
    if isinstance(node, Function):
        return "method"
    if isinstance(node, ast.ClassDef):
        return "class"
    annotation = getattr(node, "annotation", None)
    if annotation is not None:
        return ast.unparse(annotation)
    match getattr(node, "value", None):
        case ast.Call(function):
            return f"{ast.unparse(function)}(...)"
        case ast.Dict() | ast.List() | ast.Set() | ast.Tuple() as literal:
            return type(literal).__name__.lower()
    return "value"


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at one level, also those under `if`, `try` and `with`."""
    for node in body:
        yield node
        for inner in ("body", "handlers", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                for each in getattr(node, inner, []):
                    yield from _statements(each.body if isinstance(each, ast.ExceptHandler) else [each])


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield node.name
    elif isinstance(node, Function):
        if not any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list):
            yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for each in getattr(target, "elts", [target]):
                if isinstance(each, ast.Name):
                    yield each.id


def _signature(node: Function, bound: bool) -> Signature:
    args = node.args
    names = [arg.arg for arg in args.posonlyargs + args.args]
    musts = len(names) - len(args.defaults)
    positional = [(name, number < musts) for number, name in enumerate(names)][bound:]
    keywords = [(arg.arg, default is None) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return Signature(tuple(positional), tuple(keywords), (args.vararg is not None, args.kwarg is not None))


def _fields(cls: Definition) -> Iterator[tuple[str, bool]]:
    """Fields of dataclasses, structs and named tuples: each one, and whether it must be given."""
    assert isinstance(cls.node, ast.ClassDef)
    for node in cls.node.body:
        match node:
            case ast.AnnAssign(ast.Name(name), annotation) if "ClassVar" not in ast.unparse(annotation):
                yield name, node.value is None
