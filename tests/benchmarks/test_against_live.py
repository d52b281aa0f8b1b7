"""What the benchmarks learn from lone requests is what the simulator needs to be told."""

from __future__ import annotations

import pytest

from benchmarks.against_live import JUDGED, compared, overheads, worst_error
from muxserve.costs.profile import Overheads
from muxserve.metrics.summary import Summary, summarise
from muxserve.simulator import Options, simulate
from muxserve.workload.trace import TraceRequest
from tests.scheduling.machine import profile
from tests.simulator.support import Analytic, unit

LONE = [TraceRequest(2.0 * number, "m0", 64, 16) for number in range(6)]


def simulated(known: Overheads) -> Summary:
    return summarise(simulate([unit([profile("m0")], 800)], LONE, Analytic(), Options(known)).records)


def test_lone_requests_tell_what_a_fleet_takes_beside_its_steps() -> None:
    fleet = Overheads(turn=0.001, between=0.0007, request=0.009)
    found = overheads(simulated(fleet), simulated, Overheads(turn=0.001))
    assert (found.between, found.request) == pytest.approx((0.0007, 0.009))
    rows = compared(simulated(fleet), simulated(found))
    assert worst_error({"1.0": rows}) < 1e-4
    assert set(JUDGED) < set(rows)


def test_a_fleet_that_is_faster_than_told_takes_nothing_beside_its_steps() -> None:
    found = overheads(simulated(Overheads(turn=0.0002)), simulated, Overheads(turn=0.002))
    assert (found.between, found.request) == (0.0, 0.0)


def test_the_largest_error_counts_at_whatever_rate_it_is() -> None:
    right, wrong = ({key: {"error": error} for key in JUDGED} for error in (0.01, -0.2))
    assert worst_error({"1": right, "2": wrong}) == 0.2
