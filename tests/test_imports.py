"""The import rules of docs/architecture.md, enforced: what is pure stays pure, and the command line stays quick."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIVE = {"torch", "vllm", "transformers", "socket", "socketserver", "zmq", "asyncio", "multiprocessing", "subprocess"}
LIVE_MUXSERVE = {"muxserve.engine", "muxserve.gateway", "muxserve.unit", "muxserve.memory", "muxserve.cli"}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(
    "package",
    [
        "muxserve/scheduling",
        "muxserve/workload",
        "muxserve/metrics",
        "muxserve/costs",
        "muxserve/simulator",
        "muxserve/replicas",
        "muxserve/rolling",
    ],
)
def test_pure_packages_import_nothing_live(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        for line, module in imports_of(path):
            assert not within(module, LIVE | LIVE_MUXSERVE), f"{path.relative_to(ROOT)}:{line} imports {module}"


def test_placement_imports_nothing_of_the_server() -> None:
    for path in sorted((ROOT / "placement").rglob("*.py")):
        for line, module in imports_of(path):
            assert not within(module, LIVE), f"{path.relative_to(ROOT)}:{line} imports {module}"
            assert not within(module, {"muxserve"}) or within(module, {"muxserve.costs"}), (
                f"{path.relative_to(ROOT)}:{line} imports {module}"
            )


def test_vllm_is_touched_in_two_packages_only() -> None:
    for path in sorted((ROOT / "muxserve").rglob("*.py")):
        inside = path.relative_to(ROOT / "muxserve").parts[0]
        for line, module in imports_of(path):
            if within(module, {"vllm", "torch"}):
                assert inside in {"engine", "gateway"}, f"{path.relative_to(ROOT)}:{line} imports {module}"


@pytest.mark.parametrize(
    "module",
    ["muxserve", "muxserve.cli.app", "muxserve.unit.scheduler", "muxserve.cluster.controller", "placement"],
)
def test_light_modules_load_neither_torch_nor_vllm(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.strip() == "[]"
