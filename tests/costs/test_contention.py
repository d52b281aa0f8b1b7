"""What engines without leases do to each other, against what the model assumes."""

from __future__ import annotations

import pytest

from muxserve.costs.calibration import CPU_REFILL, CPU_SLICE
from muxserve.costs.contention import RunningJob, cores, kernels, slowdowns_in_crowd, time_slices
from muxserve.costs.devices import device
from muxserve.costs.interference import slowdowns
from muxserve.costs.latency import Load

COLD = 1.0 + CPU_REFILL / (2 * CPU_SLICE)
PREFILL = RunningJob(1.0, Load(0.1, 0.9), grain=5e-3)
DECODE = RunningJob(1.0, Load(0.8, 0.1), grain=0.25e-3)


def test_threads_that_have_a_core_each_are_as_fast_as_alone() -> None:
    assert cores(2, [0.5, 0.5]) == [1.0, 1.0]
    assert cores(4, [0.25, 0.5, 0.25]) == [1.0, 1.0, 1.0]


def test_three_threads_share_two_cores() -> None:
    assert cores(2, [0.5] * 3) == pytest.approx([1.5 * COLD] * 3)


def test_a_team_waits_for_all_its_threads() -> None:
    """Beside one thread on two cores each thread of a team of two runs two thirds of the time, both at once 4/9 of it;
    measured are 2.2 to 2.3 times as long as steps of one thread beside it."""
    team, single = cores(2, [1.0, 0.5])
    assert team == pytest.approx(2.25 * COLD)
    assert single == pytest.approx(1.5 * COLD)


def test_larger_teams_count_as_teams_of_two() -> None:
    (two, _), (eight, _) = cores(2, [1.0, 1.0]), cores(8, [1.0, 1.0])
    assert two / COLD == pytest.approx(4.0)
    assert eight == pytest.approx(4.0 * (1.0 + CPU_REFILL / (4 * CPU_SLICE)))


def test_a_kernel_waits_for_those_of_other_jobs_that_it_finds() -> None:
    slow_prefill, slow_decode = kernels([PREFILL, DECODE])
    assert slow_decode == pytest.approx(1.0 + 0.9 * 0.9 * 20)
    assert slow_prefill == pytest.approx(1.0 + 0.8 * 0.8 / 20)
    assert kernels([DECODE, DECODE, DECODE]) == pytest.approx([1.0 + 2 * 0.8 * 0.8] * 3)
    assert kernels([DECODE]) == [1.0]


@pytest.mark.parametrize("load", [0.9, 1.0])
def test_two_equal_jobs_that_fill_the_device_halve_it(load: float) -> None:
    """What order of arrival costs and what conservation costs are the same then."""
    jobs = [RunningJob(1.0, Load(load, 0.1), grain=1e-3)] * 2
    conserved = slowdowns([job.load for job in jobs])
    assert kernels(jobs) == pytest.approx(conserved, rel=0.01)


def test_without_mps_processes_have_the_gpu_in_turn() -> None:
    assert time_slices([PREFILL, DECODE, DECODE]) == [3.0, 3.0, 3.0]


def test_the_device_says_what_is_shared() -> None:
    jobs = [PREFILL, DECODE]
    assert slowdowns_in_crowd(device("A100-80GB"), jobs, "mps") == kernels(jobs)
    assert slowdowns_in_crowd(device("A100-80GB"), jobs, "time_slices") == [2.0, 2.0]
    assert slowdowns_in_crowd(device("CPU"), jobs, "mps") == cores(2, [1.0, 1.0])
