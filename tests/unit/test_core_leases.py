"""What units that share a machine's cores know of each other's leases."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from muxserve.net.process_rows import ProcessRows
from muxserve.spec import SimulatedSpec
from muxserve.unit.core_leases import CoreLeases
from muxserve.unit.scheduler import core_leases
from tests.unit.support import Bench, model, unit_spec
from tests.unit.test_costs import PREDICTED, decodes

HALF = 500_000


def test_each_sees_what_all_others_leased_out(tmp_path: Path) -> None:
    file = tmp_path / "cores"
    first, second, third = (CoreLeases(file, 100.0) for _ in range(3))
    began = first.elsewhere(100.0)
    second.leased(HALF, 101.0)
    third.leased(HALF, 101.5)
    first.leased(HALF, 101.5)
    second.leased(0, 102.0)
    assert first.elsewhere(102.5) - began == pytest.approx(HALF * (1.0 + 1.0))
    # Looked up moments before: what nobody changed is still known to the moment.
    assert first.elsewhere(102.502) - began == pytest.approx(HALF * 2.002)


def test_who_tells_nothing_any_more_has_nothing(tmp_path: Path) -> None:
    file = tmp_path / "cores"
    one, other = CoreLeases(file, 100.0), CoreLeases(file, 100.0)
    began = one.elsewhere(100.0)
    other.leased(HALF, 100.0)
    counted = one.elsewhere(110.0) - began
    assert 0.0 < counted <= 3.0 * HALF
    assert one.elsewhere(120.0) - began == counted
    # It says so again before that, while it has.
    for now in range(1200, 1300):
        other.leased(HALF, now / 10)
    assert one.elsewhere(130.0) - one.elsewhere(130.0 - 1e-9) < 1.0
    assert one.elsewhere(130.0) - began == pytest.approx(counted + HALF * 10, rel=0.1)


def test_who_comes_after_one_that_died_goes_on_from_its_sum(tmp_path: Path) -> None:
    file = tmp_path / "cores"
    CoreLeases(file, 100.0).leased(HALF, 100.0)
    watching = CoreLeases(file, 100.0)
    before = watching.elsewhere(110.0)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    # As if the first one had been another process, which is no more.
    ProcessRows(file, 4).numbers[0] = pid
    after = CoreLeases(file, 110.0)
    assert watching.elsewhere(110.01) == pytest.approx(before)
    after.leased(HALF, 111.0)
    assert watching.elsewhere(112.0) == pytest.approx(before + HALF)


def test_the_file_is_of_units_on_the_same_cores() -> None:
    assert unit_spec().shared_cores == unit_spec(unit="other", run_dir="/other").shared_cores
    assert unit_spec(simulated=SimulatedSpec("CPU")).shared_cores is not None
    assert unit_spec(simulated=SimulatedSpec("A100-80GB", gpus=("GPU-1",))).shared_cores is None


def test_a_unit_serves_without_them_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert core_leases(unit_spec(run_dir=str(tmp_path / "unit")), 0.0) is None
    assert "No space left on device" in caplog.text


def test_the_costs_hear_of_other_units_engines(tmp_path: Path) -> None:
    """Of two units with a core each, the other one decodes beside every other step of this one's engine."""
    other = CoreLeases(tmp_path / "cores", 1000.0)
    bench = Bench(model("a"), model("b"), costs={"a": [PREDICTED]}, cores=CoreLeases(tmp_path / "cores", 1000.0))
    bench.decoding("r")
    for turn in range(400):
        busy = turn % 2
        other.leased(busy * HALF, bench.now)
        done = decodes(steps=1, factor=1.3 if busy else 1.0)
        bench.report("a/decode", decodes=done, seconds=done.seconds, after=done.seconds)
    learnt = bench.state()["models"]["a"]["costs"]["decode"]
    assert learnt["beside"] == pytest.approx(0.6, rel=0.2)
