"""What a unit says of its engines' last jobs."""

from __future__ import annotations

import pytest

from muxserve.unit import timeline
from muxserve.unit.timeline import UnitTimeline
from muxserve.wire import TimelineReply, TimelineRequest
from tests.unit.support import GATEWAY, Bench, to


def ask(bench: Bench, since: float = 0.0) -> TimelineReply:
    (reply,) = to(GATEWAY, TimelineReply, bench.say(GATEWAY, TimelineRequest(since)))
    return reply


def test_what_engines_report_is_told_once() -> None:
    bench = Bench()
    bench.decoding("r1")
    first = ask(bench)
    assert [(job.model, job.phase, job.steps, job.tokens) for job in first.jobs] == [("a", "prefill", 1, 20)]
    (job,) = first.jobs
    assert job.end - job.start == pytest.approx(0.002)
    assert job.end <= first.now
    assert job.share == pytest.approx(bench.state()["models"]["a"]["phases"]["prefill"]["share"])
    bench.report("a/decode")
    second = ask(bench, first.now)
    assert [(job.model, job.phase) for job in second.jobs] == [("a", "decode")]
    assert not ask(bench, second.now).jobs
    assert [job.phase for job in ask(bench).jobs] == ["prefill", "decode"]
    assert second.epoch == "unit-1"


def test_a_report_without_a_step_is_no_job() -> None:
    bench = Bench()
    bench.submit("r1")
    bench.report("a/prefill", seconds=0.0, steps=0, tokens=0)
    assert not ask(bench).jobs


def test_reports_that_follow_one_another_are_one_job_up_to_a_length() -> None:
    told = UnitTimeline()
    for step in range(100):
        told.computed("a/decode", "a", "decode", 500_000, 0.010, 1, 4, 0.010 * (step + 1))
    jobs = told.since("e", 0.0, 1.0).jobs
    assert sum(job.steps for job in jobs) == 100
    assert sum(job.tokens for job in jobs) == 400
    assert all(job.end - job.start < timeline.LONGEST_SECONDS for job in jobs)
    assert len(jobs) < 6
    assert [job.start for job in jobs[1:]] == pytest.approx([job.end for job in jobs[:-1]])


@pytest.mark.parametrize(("phase", "share", "gap"), [("prefill", 1, 0.0), ("decode", 2, 0.0), ("decode", 1, 0.1)])
def test_another_phase_or_share_or_a_pause_is_another_job(phase: str, share: int, gap: float) -> None:
    told = UnitTimeline()
    told.computed("a/both", "a", "decode", 1, 0.010, 1, 1, 1.0)
    told.computed("a/both", "a", phase, share, 0.010, 1, 1, 1.010 + gap)
    assert len(told.since("e", 0.0, 2.0).jobs) == 2


def test_a_job_that_goes_on_is_told_again_under_its_number() -> None:
    told = UnitTimeline()
    told.computed("a/decode", "a", "decode", 1, 0.010, 1, 1, 1.0)
    (begun,) = told.since("e", 0.0, 1.0).jobs
    told.computed("a/decode", "a", "decode", 1, 0.010, 1, 1, 1.010)
    (longer,) = told.since("e", 1.0, 1.1).jobs
    assert longer.number == begun.number
    assert (longer.start, longer.end, longer.steps) == (pytest.approx(0.990), 1.010, 2)


def test_a_report_that_waited_does_not_make_two_steps_at_once() -> None:
    told = UnitTimeline()
    told.computed("a/decode", "a", "decode", 1, 0.010, 1, 1, 1.0)
    told.computed("a/decode", "a", "decode", 2, 0.500, 1, 1, 1.2)
    first, second = told.since("e", 0.0, 2.0).jobs
    assert second.start == first.end


def test_a_job_is_told_although_one_that_began_later_ended_earlier() -> None:
    told = UnitTimeline()
    told.computed("a/decode", "a", "decode", 1, 0.010, 1, 1, 1.0)
    told.computed("b/decode", "b", "decode", 1, 0.010, 1, 1, 1.001)
    for step in range(20):
        told.computed("a/decode", "a", "decode", 1, 0.010, 1, 1, 1.010 + 0.010 * step)
    assert [job.model for job in told.since("e", 1.1, 2.0).jobs] == ["a"]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_JOBS", 10)
    monkeypatch.setattr(timeline, "MOST_MOVES", 3)
    told = UnitTimeline()
    for n in range(50):
        told.computed("a/decode", "a", "decode", 1, 0.010, 1, 1, float(n + 1))
        told.moved("a", "u1", 0.02, float(n + 1))
    reply = told.since("e", 0.0, 60.0)
    assert [job.number for job in reply.jobs] == list(range(41, 51))
    assert [move.at for move in reply.moves] == [48.0, 49.0, 50.0]
    assert not told.since("e", 50.0, 60.0).moves
