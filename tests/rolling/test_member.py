"""What is known of a member adds up, whatever happens in whatever order."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.rolling.constraints import Constraint, PrefillDemand, check
from muxserve.rolling.member import DecodeClock, LatencyTargets, MacroMember, Window


def test_windows_open_with_the_first_prefill_and_close_after_the_last() -> None:
    member = MacroMember("u0", 1000, 0.1)
    assert member.window is Window.DECODE
    member.admitted("a", 10, 0.5, now=1.0)
    member.admitted("b", 10, 0.25, now=1.1)
    assert (member.window, member.window_seconds) == (Window.PREFILL, 0.75)
    member.prefilled("a", now=1.5)
    assert member.window is Window.PREFILL
    assert member.window_seconds == 0.75, "the window is as long as all that it was given"
    assert member.decoding == 0, "nobody decodes before the window is over"
    member.prefilled("b", now=1.75)
    assert (member.window, member.decoding) == (Window.DECODE, 2)
    member.admitted("c", 10, 0.125, now=2.0)
    assert member.window_seconds == 0.125


def test_saved_time_is_that_of_the_paper() -> None:
    member = MacroMember("u0", 1000, 0.1)
    member.admitted("a", 10, 0.5, now=0.0)
    member.prefilled("a", now=1.0)
    member.stepped(10)
    member.admitted("b", 10, 0.5, now=1.4)
    member.prefilled("b", now=1.5)
    member.stepped(2)
    now = 1.6
    a, b = 12 * 0.1 - (now - 1.0), 2 * 0.1 - (now - 1.5)
    assert member.saved(now) == pytest.approx((a + b) / 2)
    assert member.saved(now, spared=0.0) == pytest.approx(min(a, b))
    assert member.saved(now, spared=0.5) == pytest.approx(max(a, b))


def test_the_mean_counts_from_first_tokens_also_while_the_window_is_open() -> None:
    member = MacroMember("u0", 1000, 0.1)
    member.admitted("a", 10, 0.5, now=0.0)
    member.admitted("b", 10, 0.5, now=0.0)
    member.prefilled("a", now=0.5)
    assert member.saved(0.7) == pytest.approx(-0.2), "it has its first token and waits"
    assert member.saved(0.7, spared=0.0) == math.inf, "nobody decodes"
    member.prefilled("b", now=1.0)
    member.stepped(4)
    assert member.saved(1.2) == pytest.approx(((0.4 - 0.7) + (0.4 - 0.2)) / 2)
    assert member.saved(1.2, spared=0.0) == pytest.approx(0.4 - 0.2)
    member.retimed(0.2)
    assert member.saved(1.2) == pytest.approx(((0.8 - 0.7) + (0.8 - 0.2)) / 2)
    member.counted(0)
    assert member.saved(1.2) == pytest.approx(((0.8 - 0.7) + (0.8 - 0.2)) / 2)
    member.left("a", now=1.2)
    assert member.saved(1.2) == pytest.approx(0.8 - 0.2)


def test_algorithm_2_holds_the_mean_against_the_whole_window() -> None:
    """What was prefilled since the switch counts in t_total; a quantile looks at what is pending only."""
    for spared, verdict in ((None, Constraint.TPOT), (0.0, Constraint.FITS)):
        member = MacroMember("u0", 1000, 0.1)
        member.admitted("a", 10, 0.1, now=0.0)
        member.prefilled("a", now=0.1)
        member.stepped(20)
        for name in "bc":
            member.admitted(name, 10, 0.6, now=1.1)
        member.prefilled("b", now=1.2)
        # Saved: a 0.9, b -0.1 s; given since the switch and new: 1.3 s; pending and new: 0.7 s.
        objectives = LatencyTargets(5.0, 0.1, spared)
        assert check(member, PrefillDemand("d", 0.1, 10), objectives, now=1.3) is verdict


def test_without_decodes_there_is_all_the_time_in_the_world() -> None:
    assert MacroMember("u0", 1000, 0.1).saved(5.0) == math.inf


def test_predictions_follow_what_is_observed() -> None:
    member = MacroMember("u0", 1000, 0.1)
    for _ in range(100):
        member.observed(predicted=0.1, measured=0.2)
    assert member.bias == pytest.approx(2.0, rel=1e-3)
    member.admitted("a", 10, 0.1, now=0.0)
    assert member.pending_seconds == pytest.approx(0.2, rel=1e-3)
    member.observed(predicted=0.0, measured=1.0)
    assert member.bias == pytest.approx(2.0, rel=1e-3)


def test_a_request_may_leave_at_any_time() -> None:
    member = MacroMember("u0", 1000, 0.1)
    for name in "abc":
        member.admitted(name, 10, 0.1, now=0.0)
    member.left("b", now=0.05)
    assert (member.pending, member.promised) == (2, 20)
    member.prefilled("a", now=0.1)
    member.left("a", now=0.15)
    assert (member.pending, member.promised, member.fresh) == (1, 10, [])
    member.left("c", now=0.2)
    assert member.idle
    assert (member.window, member.pending_seconds, member.promised) == (Window.DECODE, 0.0, 0)
    member.left("c", now=0.3)
    member.prefilled("c", now=0.3)
    assert member.idle, "late news of what has left changes nothing"


EVENTS = st.lists(st.tuples(st.sampled_from(["admit", "prefill", "step", "leave"]), st.integers(0, 7)), max_size=60)


@given(EVENTS)
def test_sums_are_those_of_the_requests(events: list[tuple[str, int]]) -> None:
    member = MacroMember("u0", 10_000, 0.05)
    now = 0.0
    for what, number in events:
        now += 0.01
        name = f"r{number}"
        if what == "admit" and name not in member.requests:
            member.admitted(name, number + 1, 0.01 * (number + 1), now)
        elif what == "prefill":
            member.prefilled(name, now)
        elif what == "step" and member.window is Window.DECODE:
            member.stepped()
        elif what == "leave":
            member.left(name, now)
        requests = member.requests.values()
        pending = [each for each in requests if not each.prefilled]
        assert member.pending == len(pending)
        assert member.pending_seconds == pytest.approx(sum(each.prefill_seconds for each in pending), abs=1e-9)
        assert member.promised == sum(each.tokens for each in requests)
        assert member.places == sorted(each.place for each in requests if each.place is not None)
        first = [each.first_place for each in requests if each.prefilled]
        assert member.first_tokens == len(first)
        assert member.sum_of_first_places == pytest.approx(sum(first), abs=1e-9)
        assert (member.window is Window.PREFILL) == bool(pending)
        assert len(member.fresh) + len(member.places) + len(pending) == len(member.requests)


@pytest.mark.parametrize(("ttft", "tpot", "spared"), [(0, 1, None), (1, -1, None), (1, 1, 1.0), (1, 1, -0.1)])
def test_objectives_must_make_sense(ttft: float, tpot: float, spared: float | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        LatencyTargets(ttft, tpot, spared)


def test_a_request_that_comes_again_has_one_life() -> None:
    member = MacroMember("u0", 1000, 0.1)
    member.admitted("a", 10, 0.1, now=0.0)
    member.prefilled("a", now=0.1)
    member.admitted("a", 30, 0.2, now=0.2)
    assert (member.pending, member.promised, member.decoding) == (1, 30, 0)
    member.found("a", 40, since=0.0, now=0.3)
    assert (member.pending, member.promised, member.decoding) == (0, 40, 1)


def test_what_is_found_decoding_has_saved_nothing_unless_somebody_knows_better() -> None:
    member = MacroMember("u0", 1000, 0.1, clock=DecodeClock(steps=70))
    member.found("a", 10, since=3.0, now=5.0)
    assert member.saved(5.0) == pytest.approx(0.0)
    member.stepped(4)
    assert member.saved(5.1) == pytest.approx(0.3)
    place = member.requests["a"].place
    member.clear()
    assert (member.idle, member.promised, member.places, member.clock.steps) == (True, 0, [], 74)
    member.found("a", 10, since=3.0, now=6.0, place=place)
    assert member.saved(5.1) == pytest.approx(0.3)


def test_an_engine_that_counts_anew_has_not_lost_what_was_saved() -> None:
    member = MacroMember("u0", 1000, 0.1)
    for name, now in (("a", 0.0), ("b", 1.0)):
        member.admitted(name, 10, 0.1, now)
        member.prefilled(name, now)
        member.counted(member.clock.steps + 5)
    saved = member.saved(2.0), member.saved(2.0, 0.0)
    member.counted(3)
    assert member.clock.steps == 3
    assert (member.saved(2.0), member.saved(2.0, 0.0)) == pytest.approx(saved)
    member.left("a", 2.0)
    member.left("b", 2.0)
    assert member.places == []


def test_chunks_of_a_prompt_are_measured_together() -> None:
    member = MacroMember("u0", 1000, 0.1)
    member.admitted("a", 10, 0.1, now=0.0)
    member.measured(0.1, [])
    assert member.bias == 1.0
    member.measured(0.1, ["a", "unknown"])
    member.prefilled("a", 0.2)
    assert member.bias == pytest.approx(1.1), "a tenth of the way to twice as long"
    member.measured(5.0, ["a"])
    assert member.bias == pytest.approx(1.1), "it was prefilled before"


def test_other_objectives_hold_from_the_beginning() -> None:
    member = MacroMember("u0", 1000, 0.1)
    member.admitted("a", 10, 0.1, now=1.0)
    member.prefilled("a", now=1.5)
    member.counted(8)
    member.admitted("b", 10, 0.1, now=1.9)
    member.prefilled("b", now=2.0)
    member.counted(10)
    member.retimed(0.3)
    a, b = 10 * 0.3 - 1.0, 2 * 0.3 - 0.5
    assert member.saved(2.5, 0.0) == pytest.approx(b)
    assert member.saved(2.5) == pytest.approx((a + b) / 2)
    assert member.saved_by(member.requests["a"], 2.5) == pytest.approx(a)
    member.admitted("c", 10, 0.1, now=3.0)
    assert member.saved_by(member.requests["c"], 3.0) == 0.0


def test_long_prefills_weigh_more_than_short_ones() -> None:
    member = MacroMember("u0", 1000, 0.1)
    for number in range(600):
        # Each takes a tenth of a second beyond its prediction; the long ones are almost right.
        seconds = 0.01 if number % 2 else 1.0
        member.admitted("a", 10, seconds, now=0.0)
        member.measured(seconds + 0.1, ["a"])
        member.left("a", 0.0)
    # Each two prefills took 1.21 s, and 1.01 s were predicted; the mean of the ratios is 6.05.
    assert member.bias == pytest.approx(1.21 / 1.01, rel=0.02)


def test_steps_go_on_until_they_are_told() -> None:
    member = MacroMember("u0", 1000, 0.1)
    member.admitted("a", 10, 0.5, now=0.0)
    member.prefilled("a", now=1.0)
    member.counted(10, at=1.1, step_seconds=0.01)
    assert member.steps_by(1.15) == pytest.approx(15)
    assert member.saved(1.15, 0.0) == pytest.approx(15 * 0.1 - 0.15)
    member.admitted("b", 10, 0.5, now=1.15)
    assert member.steps_by(1.9) == pytest.approx(15), "a prefill keeps decodes waiting"
    member.prefilled("b", now=2.0)
    assert member.steps_by(2.1) == pytest.approx(25)
    assert member.saved(2.1, 0.0) == pytest.approx(10 * 0.1 - 0.1), "of the later one"
    member.counted(30, at=2.1, step_seconds=0.02)
    assert member.steps_by(2.2) == pytest.approx(35), "what is told counts, and the pace"


def test_steps_before_a_prefill_are_not_lost_when_less_is_told_in_the_middle_of_it() -> None:
    """An engine tells every half lease. What comes meanwhile is told with the steps of before."""
    member = MacroMember("u0", 1000, 0.1)
    member.admitted("a", 10, 0.5, now=0.0)
    member.prefilled("a", now=1.0)
    member.admitted("b", 10, 0.5, now=1.2)
    member.counted(4, at=1.05, step_seconds=0.01)
    assert member.steps_by(1.3) == pytest.approx(4 + 15), "from 1.05 to 1.2"
    assert member.saved(1.3, 0.0) == pytest.approx(19 * 0.1 - 0.3)
    member.counted(20, at=1.25, step_seconds=0.01)
    assert member.steps_by(1.3) == pytest.approx(20), "all is told"
    member.prefilled("b", now=1.4)
    member.counted(20, at=1.25, step_seconds=0.01)
    assert member.steps_by(1.5) == pytest.approx(20 + 10)


def test_steps_of_an_engine_that_is_silent_do_not_go_on_for_ever() -> None:
    member = MacroMember("u0", 1000, 0.1)
    member.admitted("a", 10, 0.5, now=0.0)
    member.prefilled("a", now=1.0)
    member.counted(10, at=1.0, step_seconds=0.01)
    assert member.steps_by(60.0) == member.steps_by(30.0) < 40
    assert member.saved(60.0, 0.0) < 0
    for at in (30.0, 31.0, 32.0):
        member.found(f"moved in at {at}", 10, since=at, now=at)
    assert member.steps_by(60.0) < 40, "whatever else happens there"


def test_an_idle_member_makes_no_steps() -> None:
    member = MacroMember("u0", 1000, 0.1)
    member.counted(10, at=1.0, step_seconds=0.01)
    assert member.steps_by(60.0) == 10
    member.found("a", 10, since=60.0, now=60.0)
    member.counted(10, at=1.0, step_seconds=0.01)
    assert member.steps_by(60.1) == pytest.approx(20), "since it has something to decode"
    member.left("a", now=60.1)
    assert member.steps_by(90.0) == pytest.approx(20)


def test_an_engine_that_counts_anew_has_not_lost_what_it_was_taken_to_have_made() -> None:
    member = MacroMember("u0", 1000, 0.1)
    member.found("a", 10, since=1.0, now=1.0)
    member.counted(10, at=1.0, step_seconds=0.01)
    member.admitted("b", 10, 0.5, now=1.1)
    saved = member.saved(1.1, 0.0)
    member.counted(0, at=1.1, step_seconds=0.01)
    assert member.saved(1.1, 0.0) == pytest.approx(saved)
