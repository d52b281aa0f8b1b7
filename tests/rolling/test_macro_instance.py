"""Algorithms 1 and 2: who gets the next request."""

import pytest

from muxserve.rolling.constraints import Constraint, PrefillDemand, check
from muxserve.rolling.macro_instance import MacroInstance
from muxserve.rolling.member import LatencyTargets, MacroMember

SLO = LatencyTargets(ttft=1.0, tpot=0.1)


def members(count: int, capacity: int = 1000) -> list[MacroMember]:
    return [MacroMember(f"u{number}", capacity, SLO.tpot) for number in range(count)]


def names(sent: list[tuple[PrefillDemand, MacroMember]]) -> list[str]:
    return [member.name for _, member in sent]


def test_each_constraint_can_be_the_one_that_says_no() -> None:
    member = members(1, capacity=100)[0]
    assert check(member, PrefillDemand("a", 0.4, 10), SLO, 0.0) is Constraint.FITS
    assert check(member, PrefillDemand("a", 1.1, 10), SLO, 0.0) is Constraint.TTFT
    assert check(member, PrefillDemand("a", 0.4, 101), SLO, 0.0) is Constraint.MEMORY
    member.admitted("x", 10, 0.3, 0.0)
    member.prefilled("x", 0.3)
    member.stepped(5)
    # 5 tokens at 0.1 s against 0.2 s that have gone by: 0.3 s are saved.
    assert check(member, PrefillDemand("a", 0.29, 10), SLO, 0.5) is Constraint.FITS
    assert check(member, PrefillDemand("a", 0.31, 10), SLO, 0.5) is Constraint.TPOT


def test_prefills_of_the_window_count_even_when_done() -> None:
    member = members(1)[0]
    member.admitted("a", 10, 0.6, 0.0)
    member.admitted("b", 10, 0.3, 0.0)
    member.prefilled("a", 0.6)
    assert check(member, PrefillDemand("c", 0.2, 10), SLO, 0.6) is Constraint.TTFT
    member.prefilled("b", 0.9)
    member.stepped(9)
    # The window is over: the next one begins empty, and decodes have saved 0.9 s.
    assert check(member, PrefillDemand("c", 0.2, 10), SLO, 0.9) is Constraint.FITS


def test_requests_stay_with_the_last_member_until_it_is_full_then_roll_on() -> None:
    macro = MacroInstance("m", SLO, members(3))
    order: list[str] = []
    for number in range(9):
        order += names(macro.arrive(PrefillDemand(f"r{number}", 0.3, 10), 0.0))
    assert order == ["u0"] * 3 + ["u1"] * 3 + ["u2"] * 3
    assert names(macro.arrive(PrefillDemand("r9", 0.3, 10), 0.0)) == []
    assert len(macro.waiting) == 1


def test_what_waits_is_sent_when_a_member_is_free_again() -> None:
    macro = MacroInstance("m", SLO, members(1))
    macro.arrive(PrefillDemand("a", 0.9, 10), 0.0)
    macro.arrive(PrefillDemand("b", 0.5, 10), 0.0)
    assert macro.retry(0.3) == []
    member = macro.member("u0")
    member.prefilled("a", 0.9)
    member.left("a", 0.9)
    assert names(macro.retry(0.9)) == ["u0"]


def test_what_is_overdue_goes_to_the_least_pending_member_with_room() -> None:
    macro = MacroInstance(
        "m", SLO, [MacroMember("u0", 50, 0.1), MacroMember("u1", 1000, 0.1), MacroMember("u2", 1000, 0.1)]
    )
    macro.arrive(PrefillDemand("a", 0.2, 50), 0.0)
    macro.member("u1").admitted("x", 10, 0.95, 0.0)
    macro.member("u2").admitted("y", 10, 0.9, 0.0)
    assert macro.arrive(PrefillDemand("b", 0.3, 60, arrival=0.0), 0.0) == []
    assert macro.due(0.0) == pytest.approx(0.7)
    assert macro.retry(0.69) == []
    assert names(macro.retry(0.71)) == ["u2"]


def test_first_come_first_served() -> None:
    macro = MacroInstance("m", SLO, members(1))
    macro.arrive(PrefillDemand("a", 0.9, 10), 0.0)
    macro.arrive(PrefillDemand("big", 0.5, 10), 0.0)
    # It would fit, but somebody is before it.
    assert macro.arrive(PrefillDemand("small", 0.05, 10), 0.0) == []
    assert [demand.request_id for demand in macro.waiting] == ["big", "small"]
    assert macro.cancel("big")
    assert not macro.cancel("big")
    assert names(macro.retry(0.0)) == ["u0"]


def test_a_leaving_member_gets_nothing() -> None:
    macro = MacroInstance("m", SLO, members(2))
    macro.member("u0").leaving = True
    assert names(macro.arrive(PrefillDemand("a", 0.1, 10), 0.0)) == ["u1"]


def test_the_turn_is_kept_when_members_come_and_go() -> None:
    macro = MacroInstance("m", SLO, members(4))
    for number in range(7):
        macro.arrive(PrefillDemand(f"r{number}", 0.3, 10), 0.0)
    # u2 has its turn.
    macro.leave("u0")
    assert names(macro.arrive(PrefillDemand("a", 0.3, 10), 0.0)) == ["u2"]
    macro.join(MacroMember("u9", 1000, 0.1))
    assert [member.name for member in macro.ring] == ["u1", "u2", "u3", "u9"]
    with pytest.raises(ValueError, match="already"):
        macro.join(MacroMember("u9", 1000, 0.1))
    with pytest.raises(KeyError):
        macro.leave("u0")


def test_no_members_no_place() -> None:
    macro = MacroInstance("m", SLO)
    assert macro.arrive(PrefillDemand("a", 0.1, 10), 5.0) == []
    assert macro.due(0.0) == pytest.approx(0.9)
    assert macro.capacity == 0


def test_sparing_more_than_the_mean_admits_less() -> None:
    member = members(1)[0]
    member.admitted("old", 10, 0.1, 0.0)
    member.prefilled("old", 0.0)
    member.stepped(20)
    member.admitted("young", 10, 0.1, 1.0)
    member.prefilled("young", 1.0)
    demand = PrefillDemand("a", 0.3, 10)
    assert check(member, demand, SLO, 1.0) is Constraint.FITS
    assert check(member, demand, LatencyTargets(1.0, 0.1, spared=0.0), 1.0) is Constraint.TPOT


def test_what_takes_longer_than_predicted_everywhere_is_overdue_earlier() -> None:
    macro = MacroInstance("m", SLO, members(2))
    for member in macro.ring:
        member.bias = 3.0
    macro.ring[0].bias = 2.0
    assert names(macro.arrive(PrefillDemand("a", 0.4, 10, arrival=0.0), 0.0)) == ["u0"]
    assert names(macro.arrive(PrefillDemand("b", 0.4, 10, arrival=0.0), 0.0)) == [], (
        "1.2 s there, but 0.8 s beside another"
    )
    assert macro.due(0.0) == pytest.approx(0.2)
    assert macro.retry(0.19) == []
    assert names(macro.retry(0.21)) == ["u1"]
    assert names(macro.arrive(PrefillDemand("c", 0.6, 10, arrival=0.3), 0.3)) == ["u0"], "too long in any case: at once"


def test_a_last_moment_is_before_what_is_pending() -> None:
    macro = MacroInstance("m", SLO, members(2))
    for member, pending in zip(macro.ring, (0.5, 0.4), strict=True):
        # The window is nearly full by what is done, so that nothing more fits.
        member.admitted("done", 10, 0.55, 0.0)
        member.admitted("pending", 10, pending, 0.0)
        member.prefilled("done", 0.0)
    assert macro.arrive(PrefillDemand("a", 0.2, 10, arrival=0.0), 0.0) == []
    assert macro.due(0.0) == pytest.approx(1.0 - 0.4 - 0.2), "behind 0.4 s in u1"
    assert macro.retry(0.39) == []
    assert names(macro.retry(0.41)) == ["u1"]


def test_a_decode_step_under_way_comes_first() -> None:
    macro = MacroInstance("m", SLO, members(1))
    (member,) = macro.ring
    member.admitted("decodes", 10, 0.1, 0.0)
    member.prefilled("decodes", 0.0)
    assert macro.arrive(PrefillDemand("a", 0.2, 10, arrival=0.0), 0.0) == [], "nothing is saved"
    assert macro.due(0.0) == pytest.approx(1.0 - SLO.tpot - 0.2)


def test_who_waits_goes_to_the_member_that_would_be_done_first() -> None:
    macro = MacroInstance("m", LatencyTargets(1.0, 0.1, 0.0), members(3))
    for member in macro.ring:
        member.admitted("decodes", 10, 0.9, 0.0)
        member.prefilled("decodes", 0.0)
    slow, prefills, _ = macro.ring
    slow.bias = 3.0
    # Less than a decode step is left to be done there, and no window is opened elsewhere.
    prefills.admitted("pending", 10, 0.05, 0.0)
    assert macro.arrive(PrefillDemand("a", 0.2, 10, arrival=0.0), 0.0) == []
    assert names(macro.retry(0.76)) == ["u1"]


def test_pending_prefills_that_are_too_many_for_anybody_do_not_draw_more() -> None:
    macro = MacroInstance("m", SLO, members(2))
    for member in macro.ring:
        member.admitted("pending", 10, 0.9, 0.0)
    assert macro.arrive(PrefillDemand("a", 0.2, 10, arrival=0.0), 0.0) == []
    assert macro.due(0.0) == pytest.approx(0.8)
    assert macro.retry(0.79) == []
    # As soon as one has done enough, it is worth while.
    macro.ring[1].admitted("short", 10, 0.3, 0.0)
    macro.ring[1].prefilled("pending", 0.5)
    assert names(macro.retry(0.51)) == ["u1"]
