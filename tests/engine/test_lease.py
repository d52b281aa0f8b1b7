"""When an engine reports. No vLLM: the lease alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from muxserve.costs.steps import StepBatch
from muxserve.engine import lease as module
from muxserve.engine.lease import HeldLease, StepNews
from muxserve.wire import Admit, Lease, Prefilled, StepReport

ADMIT = Admit("r", 1, 1, "epoch", "ipc://nowhere", b"")


class Engine:
    """A lease under a clock of its own, with `requests` requests in the engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every_step: bool = False) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.requests = 3
        self.told: list[StepReport] = []
        self.lease = HeldLease(self.told.append, lambda: (self.requests, 0), every_step)

    def run(
        self,
        steps: int,
        seconds: float = 0.001,
        tokens: int = 3,
        prefill: int = 0,
        batch: StepBatch | None = None,
        between: float = 0.0,
        **news: list,
    ) -> list[StepReport]:
        since = len(self.told)
        for _ in range(steps):
            assert self.lease.usable()
            self.now += seconds
            self.lease.stepped(seconds, tokens, StepNews(**news), prefill, batch, between)
        return self.told[since:]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    return Engine(monkeypatch)


def test_a_quiet_lease_is_reported_half_way_and_at_its_end(engine: Engine) -> None:
    engine.lease.take(Lease(7, 8, 10.0))
    reports = engine.run(8)
    assert [(r.lease_id, r.lease_left, r.steps, r.tokens) for r in reports] == [(7, 4, 4, 12), (7, 0, 4, 12)]
    assert sum(r.seconds for r in reports) == pytest.approx(0.008)
    assert not engine.lease.usable()


def test_what_steps_consisted_of_is_told_once_with_what_was_between_them(engine: Engine) -> None:
    batch = StepBatch(False, 3, 0, 3, 90)
    engine.lease.take(Lease(7, 8, 10.0))
    for report in engine.run(8, batch=batch, between=0.0001):
        assert report.prefills is None
        assert report.decodes is not None
        assert (report.decodes.steps, report.decodes.context) == (4, 360)
        assert (report.seconds, report.decodes.seconds) == pytest.approx((0.004, 0.0044))
    engine.lease.take(Lease(8, 2, 10.0))
    assert [report.decodes for report in engine.run(2)] == [None, None]


def test_half_of_the_time_counts_as_half_of_the_steps(engine: Engine) -> None:
    engine.lease.take(Lease(1, 100, 1.0))
    reports = engine.run(4, seconds=0.3)
    assert [(r.steps, r.lease_left) for r in reports] == [(2, 98), (2, 0)]


def test_news_are_told_at_once_with_all_steps_before(engine: Engine) -> None:
    engine.lease.take(Lease(1, 100, 10.0))
    assert engine.run(5) == []
    (report,) = engine.run(1, finished=["r"])
    assert (report.steps, report.tokens, report.finished) == (6, 18, ["r"])


def test_the_first_step_with_what_came_with_the_lease_is_told(engine: Engine) -> None:
    engine.lease.take(Lease(1, 100, 10.0, [ADMIT]))
    assert [r.steps for r in engine.run(10)] == [1]


def test_a_step_in_vain_is_told_apart_from_those_before(engine: Engine) -> None:
    engine.lease.take(Lease(1, 100, 10.0))
    assert engine.run(3) == []
    assert [(r.steps, r.tokens) for r in engine.run(1, tokens=0)] == [(3, 9), (1, 0)]


def test_an_empty_engine_says_so(engine: Engine) -> None:
    engine.lease.take(Lease(1, 100, 10.0))
    engine.run(2)
    engine.requests = 0
    (report,) = engine.run(1)
    assert (report.running + report.waiting, report.steps) == (0, 3)


def test_what_is_untold_when_no_step_can_follow(engine: Engine) -> None:
    engine.lease.take(Lease(1, 100, 1.0))
    engine.run(3)
    engine.now += 5.0
    assert not engine.lease.usable()
    engine.lease.tell_untold()
    engine.lease.tell_untold()
    assert [(r.steps, r.lease_left) for r in engine.told] == [(3, 0)]


def test_requests_that_end_without_a_step_leave_the_account_alone(engine: Engine) -> None:
    engine.lease.take(Lease(1, 8, 10.0))
    engine.run(2)
    engine.lease.ended_outside(["x"])
    assert (engine.told[-1].steps, engine.told[-1].seconds, engine.told[-1].finished) == (0, 0.0, ["x"])
    (report,) = engine.run(2)
    assert report.steps == 4


def test_a_renewal_carries_the_account_on(engine: Engine) -> None:
    engine.lease.take(Lease(1, 8, 10.0))
    engine.run(3)
    engine.lease.take(Lease(2, 8, 10.0))
    (report,) = engine.run(4)
    assert (report.lease_id, report.steps, report.lease_left) == (2, 7, 4)


def test_dropping_forgets_what_was_not_told(engine: Engine) -> None:
    engine.lease.take(Lease(1, 8, 10.0))
    engine.run(3)
    engine.lease.drop()
    engine.lease.tell_untold()
    assert not engine.lease.usable()
    assert engine.told == []


def test_prefill_engines_report_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, every_step=True)
    engine.lease.take(Lease(1, 8, 10.0))
    assert [r.steps for r in engine.run(3)] == [1, 1, 1]


def test_steps_that_compute_prompts_are_told_with_what_of_them_was_prefill(engine: Engine) -> None:
    engine.lease.take(Lease(1, 100, 10.0, phase="decode"))
    assert engine.run(2) == []
    engine.lease.take(Lease(2, 100, 10.0, phase="prefill"))
    first, second = engine.run(2, seconds=0.01, tokens=50, prefill=50)
    assert (first.tokens, first.prefill_tokens) == (56, 50)
    assert first.prefill_seconds == pytest.approx(0.01)
    assert first.seconds == pytest.approx(0.012)
    assert (second.tokens, second.prefill_tokens) == (50, 50)
    engine.lease.take(Lease(3, 100, 10.0, phase="both"))
    (mixed,) = engine.run(1, tokens=20, prefill=12)
    assert (mixed.tokens, mixed.prefill_tokens, mixed.prefill_seconds) == (20, 12, 0.0)
    # One that held nothing but prompts counts as prefill, whatever the lease allowed.
    (alone,) = engine.run(1, seconds=0.02, tokens=12, prefill=12)
    assert (alone.tokens, alone.prefill_tokens, alone.prefill_seconds) == (12, 12, pytest.approx(0.02))


def test_a_first_token_is_told_at_once(engine: Engine) -> None:
    engine.lease.take(Lease(1, 100, 10.0, phase="prefill"))
    started = Prefilled("r", 1, [5])
    (report,) = engine.run(1, prefilled=[started])
    assert report.prefilled == [started]


def test_waiting_for_what_is_in_flight_is_told_with_the_steps(engine: Engine) -> None:
    engine.lease.take(Lease(1, 8, 10.0))
    assert engine.run(2) == []
    engine.lease.drained(0.5, StepNews())
    assert engine.told == []
    engine.lease.drained(0.25, StepNews(finished=["r"]))
    (report,) = engine.told
    assert (report.steps, report.finished) == (2, ["r"])
    assert report.seconds == pytest.approx(0.752)
    # Without a step all that is told of steps is 0; the time is kept for the next.
    engine.lease.drained(0.25, StepNews(finished=["s"]))
    assert (engine.told[-1].steps, engine.told[-1].seconds, engine.told[-1].lease_left) == (0, 0.0, 6)
    (report,) = engine.run(1, finished=["t"])
    assert report.seconds == pytest.approx(0.251)


def test_a_smaller_share_is_something_to_tell(engine: Engine) -> None:
    assert not engine.lease.take(Lease(1, 8, 10.0, share=500_000))
    assert not engine.lease.take(Lease(2, 8, 10.0, share=700_000))
    assert engine.lease.take(Lease(3, 8, 10.0, share=300_000))
    assert engine.lease.share == 300_000


class Loop:
    """An engine's loop between two steps, with everything around it left out; `did` is what it did, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share_steps: int) -> None:
        loop = pytest.importorskip("muxserve.engine.loop")
        self.did: list[object] = []
        self.made = loop.EngineLoop.__new__(loop.EngineLoop)
        self.made.unit_spec = SimpleNamespace(share_steps=share_steps)
        self.made.binding = SimpleNamespace(phase="decode")
        self.made.scheduler = SimpleNamespace()
        self.made._region = 0
        self.made._drain = lambda: self.did.append(("drained",))
        self.made.core = SimpleNamespace(
            model_executor=SimpleNamespace(collective_rpc=lambda method, args: self.did.append((method, *args)))
        )
        self.made._lease = HeldLease(self.did.append, lambda: (1, 0), every_step=False)

    def take(self, share: int, region: int) -> list[object]:
        self.did.clear()
        self.made._handle(Lease(1, 8, 10.0, share=share, region=region))
        return [each if isinstance(each, tuple) else type(each) for each in self.did]


def test_an_engine_computes_on_the_share_of_its_lease_before_it_says_that_the_rest_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(monkeypatch, share_steps=4)
    drained = ("drained",)
    assert loop.take(1_000_000, 1_000_000) == [drained, ("compute_on", 1_000_000)]
    assert loop.take(1_000_000, 1_000_000) == [], "as before"
    assert loop.take(250_000, 500_000) == [drained, ("compute_on", 500_000), StepReport]
    assert loop.take(250_000, 250_000) == [drained, ("compute_on", 250_000)]


def test_an_engine_with_one_share_for_life_does_nothing_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Loop(monkeypatch, share_steps=0).take(250_000, 500_000) == []
