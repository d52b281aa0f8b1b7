"""Which requests are refused because their first token would come too late, against an engine on a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from muxserve.gateway.routing.predicted_wait import (
    INTERVAL_SECONDS,
    OBJECTIVE_SLACK,
    STALLED_SECONDS,
    TARGET_SECONDS,
    PredictedWait,
    PredictedWaits,
    longest_wait,
)
from tests.gateway.unit_specs import model

LONGEST = 1.0


@dataclass
class Engine:
    """Prefills up to `batch` prompts in a step of `fixed + each * prompts` seconds, first come, first served; it is
    down before `up_at`. `waits` and `refused` are what became of requests: (arrival, seconds)."""

    wait: PredictedWait
    batch: int = 8
    fixed: float = 0.02
    each: float = 0.01
    up_at: float = 0.0
    queue: list[tuple[float, int]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    refused: list[tuple[float, float]] = field(default_factory=list)

    @property
    def capacity(self) -> float:
        """Requests per second when it is busy."""
        return self.batch / (self.fixed + self.each * self.batch)

    def play(self, arrivals: Iterable[float], until: float, answered: Callable[[float], None] = lambda _: None) -> None:
        """Requests come at these times; who has its first token leaves (and `answered` is told, for closed loops)."""
        names = itertools.count(len(self.waits) + len(self.refused) + len(self.queue))
        coming = sorted(arrivals, reverse=True)
        self._coming = coming
        now, free = 0.0, self.up_at
        step: list[tuple[float, int]] = []
        while True:
            ends = free if step else float("inf")
            comes = coming[-1] if coming else float("inf")
            now = min(ends, comes)
            if now > until:
                return
            if comes < ends:
                coming.pop()
                self._arrive(now, next(names))
            else:
                for at, name in step:
                    self.wait.answered(name, 20, now)
                    self.waits.append((at, now - at))
                    self.wait.leave(name)
                    answered(now)
                step = []
            if not step and self.queue and now >= self.up_at:
                step, self.queue = self.queue[: self.batch], self.queue[self.batch :]
                free = now + self.fixed + self.each * len(step)
            elif not step and self.queue:
                coming.append(self.up_at)  # comes to when it is up
                coming.sort(reverse=True)

    def come(self, at: float) -> None:
        """One more request, of a closed loop."""
        self._coming.append(at)
        self._coming.sort(reverse=True)

    def _arrive(self, now: float, name: int) -> None:
        late = self.wait.refuses(now, 0)
        if late is not None:
            self.refused.append((now, late))
            return
        self.wait.enter(name, 0, 1, now)
        self.wait.submitted(name, 20)
        self.queue.append((now, name))


def evenly(rate: float, seconds: float, start: float = 0.0) -> list[float]:
    return [start + n / rate for n in range(int(rate * seconds))]


def overloaded(tenant: str = "") -> PredictedWait:
    """300 requests came within a second, and 20 of them were answered in the next."""
    wait = PredictedWait(LONGEST)
    for n in range(300):
        wait.enter(n, 0, 1, n / 300, tenant)
    for n in range(20):
        wait.answered(n, 20, 1.0 + n / 20)
    return wait


@pytest.mark.parametrize("times", [1.5, 5.0, 20.0])
def test_at_overload_the_wait_is_bounded_and_the_engine_busy(times: float) -> None:
    engine = Engine(PredictedWait(LONGEST))
    engine.play(evenly(times * engine.capacity, 20.0), 30.0)
    late = [seconds for at, seconds in engine.waits if at > 2.0]
    assert max(late) < 1.3 * LONGEST
    assert len(engine.waits) > 0.95 * 20.0 * engine.capacity
    assert engine.refused
    assert all(predicted > LONGEST for _, predicted in engine.refused)


def test_without_a_limit_the_queue_grows_as_it_did() -> None:
    engine = Engine(PredictedWait(None))
    engine.play(evenly(5 * engine.capacity, 5.0), 60.0)
    assert not engine.refused
    assert max(seconds for _, seconds in engine.waits) > 10 * LONGEST


@pytest.mark.parametrize("size", [32, 200])
def test_a_burst_after_idleness_is_let_in(size: int) -> None:
    """What was measured one by one says nothing of a batch, and one burst is no overload."""
    engine = Engine(PredictedWait(LONGEST), batch=64)
    engine.play([*evenly(2.0, 10.0), *[10.5] * size], 30.0)
    assert not engine.refused


def test_a_closed_loop_that_grows_is_let_in() -> None:
    """The rate of few is less than that of many: 32 clients come one by one and stay."""
    engine = Engine(PredictedWait(LONGEST), batch=64, fixed=0.1)
    engine.play([n * 0.05 for n in range(32)], 10.0, lambda now: engine.come(now + 0.001))
    assert not engine.refused
    assert len(engine.waits) > 500


def test_load_below_capacity_is_let_in() -> None:
    engine = Engine(PredictedWait(LONGEST))
    engine.play(evenly(0.9 * engine.capacity, 20.0), 30.0)
    assert not engine.refused


def test_a_model_that_is_not_up_yet_refuses_nobody() -> None:
    engine = Engine(PredictedWait(LONGEST), up_at=8.0)
    engine.play(evenly(0.5 * engine.capacity, 8.0), 20.0)
    assert not engine.refused


def test_a_rate_from_before_does_not_count_for_a_model_that_wakes() -> None:
    wait = PredictedWait(LONGEST)
    Engine(wait).play(evenly(400.0, 5.0), 20.0)
    for n in range(2000):
        assert wait.refuses(100.0 + n / 100, 0) is None
        wait.enter(("again", n), 0, 1, 100.0 + n / 100)


def test_a_death_is_not_held_against_those_who_come() -> None:
    wait = overloaded()
    assert wait.refuses(2.0, 0) is not None
    wait.interrupted()
    assert wait.refuses(2.0, 0) is None
    for n in range(20, 40):
        wait.answered(n, 20, 2.0 + n / 20)
    wait.enter("new", 0, 1, 4.0)
    assert wait.refuses(4.9, 0) is None


def test_a_wake_is_not_taken_for_a_slow_model() -> None:
    wait = PredictedWait(LONGEST)
    for n in range(8):
        wait.enter(n, 0, 1, 0.01 * n)
        wait.interrupted()  # the model sleeps, and takes 20 s to be woken
    for n in range(8):
        wait.answered(n, 20, 20.0 + 0.01 * n)
    for n in range(8, 11):
        wait.enter(n, 0, 1, 20.1)
    assert wait.refuses(20.1 + LONGEST / 2, 0) is None
    seconds = wait.seconds(20.1)
    assert seconds is not None
    assert seconds < 1.0


def test_nobody_is_refused_while_nothing_comes_out() -> None:
    wait = overloaded()
    assert wait.refuses(1.95 + STALLED_SECONDS, 0) is not None
    assert wait.refuses(2.05 + STALLED_SECONDS, 0) is None


def test_a_batch_counts_once_for_others() -> None:
    wait = PredictedWait(LONGEST)
    wait.enter("batch", 0, 1000, 0.0)
    for _ in range(1000):
        wait.submitted("batch", 20)
    for n in range(40):
        wait.answered("batch", 20, (n + 1) / 20)
    assert wait.seconds(2.0) == pytest.approx(2 / 20, rel=0.1)
    assert wait.refuses(2.0, 0) is None


def test_better_ranks_wait_for_their_own_only() -> None:
    wait = overloaded()
    assert wait.refuses(2.0, 0) is not None
    assert wait.refuses(2.0, 1) is not None
    assert wait.refuses(2.0, -1) is None


def test_tenants_wait_for_their_own_and_for_as_many_of_others() -> None:
    wait = overloaded("flood")
    assert wait.refuses(2.0, 0, "flood") is not None
    assert wait.refuses(2.0, 0, "calm") is None
    own, other = wait.seconds(2.0, 0, "flood"), wait.seconds(2.0, 0, "calm")
    assert own is not None
    assert other == pytest.approx(own * 2 / 281)


def test_long_prompts_ahead_count_by_their_tokens() -> None:
    """What was measured of long prompts does not refuse short ones."""
    wait = PredictedWait(LONGEST)
    for n in range(40):
        wait.enter(("long", n), 0, 1, 0.0)
        wait.submitted(("long", n), 2000)
    for n in range(40):
        wait.answered(("long", n), 2000, (n + 1) / 5)
    for n in range(40):
        wait.enter(("short", n), 0, 1, 8.0)
        wait.submitted(("short", n), 20)
    assert wait.seconds(8.0) == pytest.approx(41 * 20 / 10_000, rel=0.1)


def test_who_leaves_is_not_waited_for() -> None:
    wait = PredictedWait(LONGEST)
    for n in range(300):
        wait.enter(n, 0, 1, n / 300)
        wait.submitted(n, 20)
    for n in range(20):
        wait.answered(n, 20, 1.0 + n / 20)
    before = wait.seconds(2.0)
    for n in range(20, 290):
        wait.leave(n)
    after = wait.seconds(2.0)
    assert before is not None
    assert after is not None
    assert after < before / 10


def test_without_an_objective_only_a_standing_queue_is_bounded() -> None:
    longest, patient = longest_wait(model("m"))
    assert (longest, patient) == (TARGET_SECONDS, True)
    engine = Engine(PredictedWait(longest, patient))
    # Twice what it can do for six seconds: somebody waits for six, and it drains by itself.
    engine.play(evenly(2 * engine.capacity, 6.0), 30.0)
    assert not engine.refused
    assert max(seconds for _, seconds in engine.waits) > TARGET_SECONDS
    engine = Engine(PredictedWait(longest, patient))
    engine.play(evenly(2 * engine.capacity, 120.0), 200.0)
    first = engine.refused[0][0]
    assert first > INTERVAL_SECONDS
    assert max(seconds for at, seconds in engine.waits if at > first + 30.0) < 1.2 * TARGET_SECONDS


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"max_wait": "none", "slo_ttft_ms": 500.0}, (None, False)),
        ({"max_wait": 3.0, "slo_ttft_ms": 500.0}, (3.0, False)),
        ({"slo_ttft_ms": 500.0}, (0.5 * OBJECTIVE_SLACK, False)),
        ({}, (TARGET_SECONDS, True)),
    ],
)
def test_the_limit_is_that_of_the_fleet_file(changes: dict[str, object], longest: tuple[float | None, bool]) -> None:
    waits = PredictedWaits()
    waits.learn(model("m", **changes))  # type: ignore[arg-type]
    assert (waits["m"].longest, waits["m"].patient) == longest
    waits.forget("m")
    assert waits["m"].longest is None
