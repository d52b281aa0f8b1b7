"""What else runs on the cores of a CPU unit, by the kernel's counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.net.core_times import CoreTimes
from muxserve.spec import GpuSpec, SimulatedSpec
from muxserve.unit.core_use import CoreUse
from muxserve.unit.scheduler import shared_cores
from tests.support.kernel import Kernel
from tests.unit.support import Bench, model, unit_spec
from tests.unit.test_costs import PREDICTED, decodes

WHOLE = 1_000_000


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path / "stat")


def test_what_the_own_engines_compute_is_no_others(kernel: Kernel) -> None:
    use = CoreUse(kernel.cores(), kernel.now)
    began = use.elsewhere(kernel.now)
    for _ in range(100):
        kernel.passed(0.1, 0.15)
        use.computed(0.05)
        use.elsewhere(kernel.now)
    # A tenth of a core-second of two cores in each tenth of a second; the first look was no look ahead.
    assert use.elsewhere(kernel.now) - began == pytest.approx(0.5 * WHOLE * 9.9, rel=0.01)


def test_steps_that_are_told_late_are_counted_all_the_same(kernel: Kernel) -> None:
    use = CoreUse(kernel.cores(), kernel.now)
    for turn in range(200):
        kernel.passed(0.1, 0.1)
        if turn % 2:
            use.computed(0.2)
        use.elsewhere(kernel.now)
    later = use.elsewhere(kernel.now)
    for _ in range(10):
        kernel.passed(0.1, 0.1)
        use.computed(0.1)
    # Nobody else had anything.
    assert use.elsewhere(kernel.now) - later < 0.1 * WHOLE


def test_a_machine_that_falls_silent_is_so_within_a_second(kernel: Kernel) -> None:
    use = CoreUse(kernel.cores(), kernel.now)
    for _ in range(20):
        kernel.passed(0.1, 0.2)
        use.elsewhere(kernel.now)
    for _ in range(10):
        kernel.passed(0.1, 0.0)
        use.elsewhere(kernel.now)
    before = use.elsewhere(kernel.now)
    assert use.elsewhere(kernel.now + 0.09) - before < 0.1 * WHOLE * 0.09


def test_cores_that_the_kernel_says_nothing_of_are_an_error(kernel: Kernel) -> None:
    with pytest.raises(ValueError, match="1 of 2 cores"):
        CoreTimes((1, 7), kernel.path)


def test_a_core_that_is_taken_away_is_busy_and_ends_nothing(kernel: Kernel) -> None:
    use = CoreUse(kernel.cores(), kernel.now)
    kernel.passed(0.1, 0.0)
    before = use.elsewhere(kernel.now)
    kernel.path.write_text("cpu0 1 2 3 4 5")
    for _ in range(20):
        kernel.now += 0.1
        use.elsewhere(kernel.now)
    assert 0.0 < use.elsewhere(kernel.now) - before <= 2.0 * WHOLE


def test_the_kernel_tells_of_the_cores_of_this_process() -> None:
    assert CoreTimes.own().idle_seconds() > 0.0


def test_units_with_devices_of_their_own_do_not_ask() -> None:
    assert unit_spec().shares_cores
    assert not unit_spec(simulated=SimulatedSpec("CPU")).shares_cores
    assert not unit_spec(gpu=GpuSpec(("GPU-1",))).shares_cores


def test_a_unit_serves_where_the_kernel_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hidden() -> CoreTimes:
        raise PermissionError("no /proc/stat here")

    monkeypatch.setattr(CoreTimes, "own", hidden)
    assert shared_cores(unit_spec()) is None
    assert "no /proc/stat here" in caplog.text


def test_the_costs_hear_of_it(kernel: Kernel) -> None:
    """Something keeps the other core busy at times; steps are slower meanwhile."""
    bench = Bench(model("a"), model("b"), costs={"a": [PREDICTED]}, cores=CoreUse(kernel.cores(), kernel.now))
    bench.decoding("r")
    for turn in range(2000):
        busy = turn // 200 % 2
        done = decodes(steps=1, factor=1.3 if busy else 1.0)
        kernel.passed(done.seconds, (1.0 + busy) * done.seconds)
        bench.report("a/decode", decodes=done, seconds=done.seconds, after=done.seconds)
    learnt = bench.state()["models"]["a"]["costs"]["decode"]
    assert learnt["beside"] == pytest.approx(0.6, rel=0.2)


def test_a_step_takes_all_cores_of_its_engine(kernel: Kernel) -> None:
    use = CoreUse(kernel.cores(), kernel.now)
    bench = Bench(model("a", threads=2), model("b"), costs={"a": [PREDICTED]}, cores=use)
    bench.decoding("r")
    began = use.elsewhere(kernel.now)
    for _ in range(200):
        done = decodes(steps=1)
        kernel.passed(done.seconds, 2.0 * done.seconds)
        bench.report("a/decode", decodes=done, seconds=done.seconds, after=done.seconds, between=0.0001)
    state = bench.state()
    # Between steps one thread computes.
    steps = state["models"]["a"]["costs"]["decode"]["seconds"]
    assert state["core_seconds"] == pytest.approx(2.0 * steps + 200 * 0.0001)
    # Nobody else had anything.
    assert use.elsewhere(kernel.now) - began < 0.05 * WHOLE * 200 * done.seconds


def test_the_cores_of_an_engine_are_its_ranks_threads_and_no_more_than_there_are() -> None:
    assert unit_spec(model("a", threads=1)).cores_of("a") == 1
    assert unit_spec(model("a", threads=1), ranks=2).cores_of("a") == 2
    assert unit_spec(model("a", threads=1), ranks=2, stages=2).cores_of("a") == 1
    assert unit_spec(model("a", threads=8)).cores_of("a") == 2
