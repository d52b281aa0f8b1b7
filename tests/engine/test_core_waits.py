"""How long a thread waited for a core, and how long it computes between steps."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest

from muxserve.engine import core_waits
from muxserve.engine.core_waits import BetweenSteps, CoreWaits, NoWaits, without_waiting


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


def test_what_the_thread_computes_between_two_steps_counts_and_its_sleep_does_not() -> None:
    between = BetweenSteps()
    assert between.end() == 0.0, "nothing was before the first step"
    began = time.thread_time()
    between.begin()
    threading.Event().wait(0.05)
    asleep = between.end()
    while time.thread_time() < began + 0.02:
        pass
    assert asleep < 0.02 <= time.thread_time() - began
    assert asleep < between.end() <= time.thread_time() - began


def test_what_it_computes_while_it_has_no_step_to_take_does_not_count() -> None:
    between = BetweenSteps()
    between.begin()
    between.idle()
    assert between.end() == 0.0


def test_a_pause_is_what_went_by_with_nothing_to_do() -> None:
    between = BetweenSteps()
    assert between.pause(time.monotonic()) == math.inf, "it has taken no step"
    between.begin()
    assert between.pause(time.monotonic() + 9.0) == 0.0, "the next step follows at once, however long that takes"
    between.idle()
    assert between.idled(time.monotonic())
    assert not between.idled(time.monotonic() - 9.0), "it was in a step then"
    assert 9.0 <= between.pause(time.monotonic() + 9.0) < 10.0
