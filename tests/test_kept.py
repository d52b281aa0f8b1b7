"""What programs beside the tests have written is used again as long as they would write the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import kept
from tests.support.kept import Kept, note


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a module of ours, which the program has loaded."""
    monkeypatch.setattr(kept, "KEPT", tmp_path / "kept")
    file = tmp_path / "program.py"
    file.write_text("ANSWER = 1")
    module = ModuleType("tests.program")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return file


def made(result: Kept) -> Path:
    """A process of the program has written into the directory, and one that it forked below it."""
    directory = result.new()
    (directory / "answer").write_text("1")
    (directory / "more").mkdir()
    note(directory / "more")
    return directory


def test_a_result_is_found_until_something_of_what_made_it_is_another(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Kept("answers", ["program", "model"])
    assert result.found() is None
    result.keep(first := made(result))
    result.forget(first)
    assert Kept("answers", ["program", "model"]).found() == first
    assert Kept("answers", ["program", "another model"]).found() is None
    monkeypatch.setattr(kept, "_SETTINGS", [("VLLM_CPU_SGL_KERNEL", "1")])
    assert result.found() is None


def test_a_module_that_was_loaded_makes_a_new_result(source: Path) -> None:
    result = Kept("answers", ["program"])
    result.keep(first := made(result))
    text = source.read_text()
    source.write_text("ANSWER = 2")
    assert result.found() is None
    source.write_text(text)
    assert result.found() == first
    source.unlink()
    assert result.found() is None
    source.write_text("ANSWER = 2")
    result.keep(second := made(result))
    assert result.found() == second
    # Another session may be reading it. A day later none does.
    assert first.exists()
    for directory in first, second:
        os.utime(directory, (0, 0))
    result.forget(result.new())
    assert not first.exists()
    assert result.found() == second


def test_what_was_not_kept_is_removed(source: Path) -> None:
    result = Kept("answers", ["program"])
    result.keep(first := made(result))
    result.forget(failed := made(result))
    assert not failed.exists()
    assert result.found() == first


def test_two_sessions_that_make_the_same_at_once_have_what_they_made(source: Path) -> None:
    result, other = Kept("answers", ["program"]), Kept("answers", ["program"])
    first, second = made(result), made(other)
    result.keep(first)
    other.keep(second)
    assert (first / "answer").exists()
    assert (second / "answer").exists()
    assert result.found() == first
    other.forget(second)
    assert not second.exists()
    assert result.found() == first
