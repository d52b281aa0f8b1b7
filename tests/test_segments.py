"""A test session that leaves shared memory behind fails, says whose it was, and removes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from muxserve.memory import server
from tests.memory.support import unit_spec
from tests.support import segments

ROOT = Path(__file__).resolve().parents[1]
LEAVES = """
from pathlib import Path
from muxserve.memory import server
from tests.memory.support import unit_spec

def test_leaves(tmp_path):
    Path(f"/dev/shm/{server.prefix(unit_spec(tmp_path / 'fleet/test'))}.guard").touch()
    (tmp_path / "fleet").mkdir()
"""


def test_a_session_fails_by_what_it_leaves(tmp_path: Path) -> None:
    file = tmp_path / "test_leaves.py"
    file.write_text(LEAVES)
    line = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run([*line, f"--basetemp={tmp_path}/base"], cwd=ROOT, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "shared memory was left behind" in done.stdout
    assert f"of {tmp_path}/base/test_leaves0/fleet/test" in done.stdout
    assert not Path(f"/dev/shm/{server.prefix(unit_spec(tmp_path / 'base/test_leaves0/fleet/test'))}.guard").exists()


def test_what_other_sessions_have_is_not_ours(tmp_path: Path) -> None:
    ours, theirs = (Path(f"/dev/shm/{server.prefix(unit_spec(tmp_path / name))}.guard") for name in ("ours", "theirs"))
    try:
        for path in (ours, theirs):
            path.touch()
        assert segments.left([str(tmp_path / "ours")]) == {ours: str(tmp_path / "ours")}
    finally:
        segments.remove([ours, theirs])
