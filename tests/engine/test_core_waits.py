"""How long a thread waited for a core."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from muxserve.engine import core_waits
from muxserve.engine.core_waits import CoreWaits, NoWaits, without_waiting


def test_it_is_what_the_kernel_counts_of_this_thread() -> None:
    counted, waits = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat"), CoreWaits()

    def kernel() -> float:
        return int(counted.read_text().split()[1]) * 1e-9

    before, total, after = kernel(), waits.total(), kernel()
    assert before <= total <= after
    # Of another thread it is another figure, and each asks for its own.
    found: list[float] = []
    other = threading.Thread(target=lambda: found.append(CoreWaits().total()))
    other.start()
    other.join()
    assert 0.0 <= found[0] < 60.0


def test_where_the_kernel_does_not_tell_nothing_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NoWaits().total() == 0.0
    monkeypatch.setattr(core_waits.os, "open", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    assert CoreWaits().total() == 0.0


def test_something_is_left_of_a_step() -> None:
    assert without_waiting(0.01, 0.0) == 0.01
    assert without_waiting(0.01, 0.004) == pytest.approx(0.006)
    assert 0.0 < without_waiting(0.01, 0.02) < 0.001
