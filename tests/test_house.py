"""tools/house.py counts what it says, and fails no run."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "muxserve/cluster/one.py": """
from collections.abc import Callable
from muxserve.cluster.two import Two

Tell = Callable[[str], None]

class One:
    def __init__(self, tell: Tell, done: Callable[[], None] | None, size: int) -> None:
        self.size = size

class Model: ...
""",
    "muxserve/cluster/two.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from muxserve.cluster.one import One

class Two:
    def use(self) -> None:
        from muxserve.cluster.three import Three

f(1, 2, 3, 4, 5, 6, 7, 8, nine=9)
f(1, 2, 3, 4, 5, 6, 7, eight=8)
""",
    "muxserve/cluster/three.py": """
from muxserve.cluster import two

class Three:
    a: int
    b: int

class One: ...
""",
    "muxserve/engine/cpu/worker.py": "class Worker: ...\n",
    "muxserve/engine/cuda/worker.py": "class Worker: ...\n",
    "tests/test_it.py": "\n\n",
    "docs/page.md": "a\nb\nc\n",
    "configs/fleet.schema.json": json.dumps({"properties": {"a": 1, "b": 2}, "$defs": {"M": {"properties": {"c": 3}}}}),
}


@pytest.fixture
def house(tmp_path: Path) -> Any:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    module = runpy.run_path(str(ROOT / "tools/house.py"))
    return module["House"](tmp_path)


def test_it_counts(house: Any) -> None:
    counts = {row.name: row.value for row in house.rows()}
    assert counts["files of muxserve and placement"] == 5
    assert counts["lines of tests"] == 2
    assert counts["lines of docs"] == 3
    assert counts["calls with 9 or more arguments"] == 1
    assert counts["callables that constructors of cluster take"] == 2
    assert counts["circles of files"] == 1  # one and two; what a function imports is no circle
    assert counts["classes of more than 20 fields"] == 0
    assert counts["keys of the fleet file"] == 3
    assert counts["descriptions of a model"] == 1
    assert counts["learners of time"] == 0
    assert counts["options of plan"] > 5
    assert house.double_names() == ["One"]  # an engine for CPUs and one for GPUs are a pair


def test_it_says_what_is_above_its_target_and_fails_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "tools/house.py"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == 14
    assert all(" of " in line for line in lines)
