"""No method and no attribute of ours replaces one of vLLM's but those that are declared to."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from prometheus_client.registry import CollectorRegistry
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from muxserve.engine.cuda.runner import PooledGPUModelRunner
from muxserve.vllm.overrides import is_ours_over_vllm, problems

ROOT = Path(__file__).resolve().parents[2]
# The packages that may import vLLM.
PACKAGES = ("engine", "forks", "gateway", "probes", "vllm")


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / "muxserve" / package).rglob("*.py")):
            if path.stem != "__main__":
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text())


def written(name: str, module: ast.Module) -> Iterator[str]:
    """Classes of a module that name one of vLLM's as a base, also those that a function makes."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(module)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0] == "vllm"
    }
    # What only type checkers take for a base is none.
    mixed_in = {node.targets[0].id for node in ast.walk(module) if isinstance(node, ast.Assign) and _is_object(node)}
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            bases = {word.id for base in node.bases for word in ast.walk(base) if isinstance(word, ast.Name)}
            if bases & (imported - mixed_in):
                yield f"{name}.{node.name}"


def _is_object(node: ast.Assign) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "object" and isinstance(node.targets[0], ast.Name)


def subclasses(cls: type) -> Iterator[type]:
    for each in type.__subclasses__(cls):
        yield each
        yield from subclasses(each)


@pytest.fixture(scope="module")
def ours() -> list[type]:
    """Every class of ours that is derived from one of vLLM's."""
    read = list(modules())
    for name, module in read:
        if any(isinstance(node, ast.ClassDef) and node.bases for node in ast.walk(module)):
            importlib.import_module(name)
    from muxserve.gateway.status.vllm_metrics import stat_logger

    made = stat_logger("m", CollectorRegistry())  # a class that a function makes
    found = {cls for cls in subclasses(object) if is_ours_over_vllm(cls)}
    assert made in found
    seen = {f"{cls.__module__}.{cls.__name__}" for cls in found}
    missing = {cls for name, module in read for cls in written(name, module)} - seen
    assert not missing, f"classes that this test does not see: {sorted(missing)}"
    return sorted(found, key=lambda cls: (cls.__module__, cls.__qualname__))


def test_ours_replace_of_vllm_s_what_is_declared(ours: list[type]) -> None:
    found = problems(ours)
    assert not found, "\n".join(found)


def test_vllm_pools_with_its_own_method() -> None:
    """Every answer of an embedding model on a GPU goes through it."""
    assert PooledGPUModelRunner._pool is GPUModelRunner._pool


class Stock:
    def __init__(self) -> None:
        self.pages = 1

    def step(self) -> None: ...

    def wait(self) -> None: ...


class Mixin:
    def wait(self) -> None: ...


class Ours(Mixin, Stock):
    size: int

    def __init__(self) -> None:
        super().__init__()
        self.pages = 2

    def step(self) -> None: ...

    def own(self) -> None: ...


def test_undeclared_methods_mixins_and_attributes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, place in ((Stock, "vllm.stock"), (Mixin, "muxserve.mixin"), (Ours, "muxserve.ours")):
        monkeypatch.setitem(sys.modules, place, sys.modules[__name__])  # where the class's source is found
        monkeypatch.setattr(cls, "__module__", place)
    assert is_ours_over_vllm(Ours)
    assert not is_ours_over_vllm(Mixin)
    assert problems([Ours], {"muxserve.ours.Ours": ("step", "gone")}) == [
        "muxserve.mixin.Mixin.wait shadows vllm.stock.Stock.wait: rename it, or declare it in OVERRIDES",
        "muxserve.ours.Ours.gone is declared in OVERRIDES, and replaces nothing of vLLM's",
        "muxserve.ours.Ours.pages shadows vllm.stock.Stock.pages: rename it, or declare it in OVERRIDES",
    ]
