"""The table of packages in docs/architecture.md, enforced: what each imports, what is pure, and that there are no
circles. The command line stays quick."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from muxserve.vllm.syntax import parse

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/architecture.md"
# What a pure package does not touch: other processes, the network, threads, the machine's clock.
LIVE = {"asyncio", "multiprocessing", "selectors", "signal", "socket", "subprocess", "threading", "time"}
# The row of a package: name, what is in it, what it imports.
ROW = re.compile(r"^\| `(?P<name>muxserve/\w+(?:/|\.py)|placement/)` \| (?P<what>.*?) \| (?P<imports>[^|]*) \|$", re.M)


def packages() -> dict[str, Path]:
    """Every package and module directly below `muxserve`, and `placement`, by the name that the table has it under."""
    found = {"placement": ROOT / "placement"}
    for path in (ROOT / "muxserve").iterdir():
        if path.is_dir() and any(path.rglob("*.py")):
            found[path.name] = path
        elif path.suffix == ".py" and path.name != "__init__.py":
            found[path.stem] = path
    return found


def rows() -> dict[str, tuple[bool, set[str]]]:
    """Each row of the table: whether the package is pure, and what the table says that it imports."""
    found = {}
    for row in ROW.finditer(TABLE.read_text()):
        name = Path(row["name"].removeprefix("muxserve/")).stem
        found[name] = row["what"].startswith("pure"), set(re.findall(r"`([\w.]+)`", row["imports"]))
    return found


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module != "muxserve":
                yield node.lineno, node.module
            else:
                for alias in node.names:
                    yield node.lineno, f"muxserve.{alias.name}"


def edges() -> dict[str, dict[str, str]]:
    """What each package imports of other packages and of libraries, and where it does."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, place in packages().items():
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            for line, module in imports_of(path):
                first, _, rest = module.partition(".")
                # There is a `muxserve.vllm` as well.
                library = "vLLM" if first == "vllm" else first
                other = rest.partition(".")[0] if first == "muxserve" else library
                if other and other != name:
                    found[name].setdefault(other, f"{path.relative_to(ROOT)}:{line}")
    return found


ROWS = rows()
EDGES = edges()


def test_the_table_has_every_package() -> None:
    assert set(ROWS) == set(packages())


@pytest.mark.parametrize("package", sorted(ROWS))
def test_a_package_imports_what_the_table_says(package: str) -> None:
    said = ROWS[package][1]
    found = {other: where for other, where in EDGES[package].items() if other not in sys.stdlib_module_names}
    unknown = [f"{where} imports {other}" for other, where in sorted(found.items()) if other not in said]
    assert not unknown, f"not in the table of docs/architecture.md: {'; '.join(unknown)}"
    assert said <= set(found), f"in the table, and not imported by {package}: {sorted(said - set(found))}"


@pytest.mark.parametrize("package", sorted(name for name, (pure, _) in ROWS.items() if pure))
def test_a_pure_package_touches_nothing_live(package: str) -> None:
    live = [f"{where} imports {other}" for other, where in EDGES[package].items() if other in LIVE]
    assert not live
    impure = [other for other in EDGES[package] if other in ROWS and not ROWS[other][0]]
    assert not impure, f"{package} is pure, and imports {impure}"


def test_there_are_no_circles() -> None:
    left = {name: {other for other in EDGES[name] if other in ROWS} for name in ROWS}
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    assert not left, f"packages that import each other, and those that import them: {sorted(left)}"


@pytest.mark.parametrize(
    "module",
    ["muxserve", "muxserve.cli.app", "muxserve.unit.scheduler", "muxserve.cluster.controller", "placement"],
)
def test_light_modules_load_neither_torch_nor_vllm(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.strip() == "[]"
