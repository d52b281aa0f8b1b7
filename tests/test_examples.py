"""The examples do what they say."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_cells_of_the_planning_notebook_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    cells = json.loads((ROOT / "examples/capacity_planning.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            # The last line of the last cell is what a notebook shows.
            exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    assert "needed: 16" in said
    assert "unit0: " in said
