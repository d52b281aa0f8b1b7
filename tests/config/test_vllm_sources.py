"""Sources are read whatever is collected meanwhile."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

from muxserve.vllm.syntax import parse


class ParsesWhenCollected:
    """As a task does whose exception nobody awaited: the log's traceback parses the line that raised."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        ast.parse("1")


def test_garbage_that_parses_does_not_disturb(tmp_path: Path) -> None:
    file = tmp_path / "nested.py"
    file.write_text("x = [" + "f(a, [b, {c: d}]), " * 1000 + "]\n")
    thresholds = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        for _ in range(10):
            ParsesWhenCollected()
            assert isinstance(parse(file).body[0], ast.Assign)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
