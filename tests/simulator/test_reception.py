"""Requests are received on the cores that engines compute on."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.costs import Load
from muxserve.costs.front_end import FrontEndWork
from muxserve.costs.interference import Interference, slowdowns
from muxserve.simulator.clock import Clock, Compute
from muxserve.simulator.reception import Reception
from muxserve.simulator.requests import SimRequest


class Alone:
    """A latency model of a device on which nothing is computed."""

    def engine(self, *_: object) -> object:
        raise AssertionError("nothing is computed")

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        return slowdowns(Interference(), loads)


class Desk:
    """A reception whose cores nobody else wants, and when requests had been received."""

    def __init__(self, work: float, delay: float, spread: float = 0.0, seed: int = 0, lease: float = 0.0) -> None:
        self.clock = Clock()
        self.compute = Compute("CPU", Alone())  # type: ignore[arg-type]
        self.received: dict[str, float] = {}
        made = FrontEndWork(work, 0.0, lease=lease)
        self.reception = Reception(self.clock, self.compute, made, delay, self._arrive, spread, seed)
        self.compute.reception = self.reception
        self.compute.changes = self._changes  # type: ignore[method-assign]
        # Seconds in which it had something to do until `since`, when it last began or ended.
        self.busy = self.since = 0.0
        self._active = False

    def _changes(self) -> None:
        if self._active:
            self.busy += self.clock.now - self.since
        self.since, self._active = self.clock.now, self.reception.active

    def _arrive(self, request: SimRequest, now: float) -> None:
        # It ends at once.
        self.reception.leased(now)
        self.received[request.request_id] = now
        self.clock.open -= 1
        self.reception.ended(now)

    def send(self, *times: float) -> dict[str, float]:
        requests = (SimRequest(str(number), "m", time, 8, 2) for number, time in enumerate(times))
        self.clock.run(requests, self.reception.sent, 0.0)
        return self.received


def test_not_all_take_as_long() -> None:
    apart = [float(number) for number in range(2000)]
    received = Desk(0.002, 0.004, 0.001).send(*apart)
    took = [received[str(number)] - sent for number, sent in enumerate(apart)]
    assert (fmean(took), pstdev(took)) == pytest.approx((0.004, 0.001), rel=0.05)
    assert received == Desk(0.002, 0.004, 0.001).send(*apart), "each time the same"
    assert received != Desk(0.002, 0.004, 0.001, seed=1).send(*apart)


def test_one_at_a_time_takes_its_delay() -> None:
    assert Desk(0.004, 0.005).send(1.0, 2.0) == pytest.approx({"0": 1.005, "1": 2.005})


def test_one_after_another() -> None:
    assert Desk(0.004, 0.005).send(1.0, 1.001, 1.002) == pytest.approx({"0": 1.005, "1": 1.010, "2": 1.015})


def test_what_is_left_for_the_end_holds_up_nobody() -> None:
    desk = Desk(0.010, 0.005)
    assert desk.send(1.0, 1.006) == pytest.approx({"0": 1.005, "1": 1.011})
    assert desk.reception.behind > 0.0


def test_a_lease_holds_up_nobody() -> None:
    desk = Desk(0.004, 0.005, lease=0.01)
    desk.clock.at(0.999, desk.reception.leased)
    desk.clock.at(1.002, desk.reception.leased)
    assert desk.send(1.0, 1.1) == pytest.approx({"0": 1.005, "1": 1.105})
    # Half of the cores work on leases: for 1 ms before the first request, and on all that is left after it, with its
    # own lease and its end.
    assert desk.busy == pytest.approx(3 * 0.01 / 0.5 + (0.004 / 0.5 - 0.005) + 2 * 0.005)


@given(
    st.lists(st.floats(0.0, 0.05), min_size=1, max_size=8),
    st.floats(0.0005, 0.02),
    st.floats(0.001, 0.01),
    st.sampled_from([0.0, 0.0007]),
)
def test_the_cores_are_busy_with_all_of_the_work(gaps: list[float], work: float, delay: float, lease: float) -> None:
    """Each request that is received brings a lease."""
    desk = Desk(work, delay, lease=lease)
    now, times = 0.0, []
    for gap in gaps:
        now += gap
        times.append(now)
    end = max(desk.send(*times).values())
    done = desk.busy + (end - desk.since if desk.reception.active else 0.0)
    assert desk.reception.load.brought * (done + desk.reception.behind) == pytest.approx(len(times) * (work + lease))
