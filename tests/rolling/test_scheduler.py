"""Several macro instances: requests, replicas that come, go and change macro instance."""

import pytest

from muxserve.rolling.constraints import PrefillDemand
from muxserve.rolling.member import LatencyTargets, MacroMember
from muxserve.rolling.mitosis import Bounds
from muxserve.rolling.scaling import Attainment, RollingScalingRules
from muxserve.rolling.scheduler import RollingScheduler

SLO = LatencyTargets(ttft=1.0, tpot=0.1)


def scheduler(count: int, bounds: Bounds) -> RollingScheduler:
    made = RollingScheduler(SLO, bounds)
    for number in range(count):
        made.grow(MacroMember(f"u{number}", 1000, SLO.tpot), 0.0)
    return made


def test_a_split_moves_members_with_their_requests() -> None:
    rolling = scheduler(4, Bounds(2, 4))
    sent = [member.name for n in range(6) for _, member in rolling.arrive(PrefillDemand(f"r{n}", 0.3, 10), 0.0)]
    assert sent == ["u0"] * 3 + ["u1"] * 3
    rolling.grow(MacroMember("u4", 1000, SLO.tpot), 0.0)
    assert {name: [m.name for m in macro.ring] for name, macro in rolling.macros.items()} == {
        "m1": ["u2", "u3", "u4"],
        "m2": ["u0", "u1"],
    }
    assert rolling.moved == 2
    # News of requests finds the member where it is now.
    for n in range(3):
        rolling.member("u0").prefilled(f"r{n}", 0.9)
    assert rolling.macros["m2"].member("u0").decoding == 3


def test_requests_go_to_the_macro_instance_with_most_room() -> None:
    rolling = scheduler(5, Bounds(2, 4))
    first = {member.name for n in range(2) for _, member in rolling.arrive(PrefillDemand(f"r{n}", 0.1, 500), 0.0)}
    assert len({next(name for name, m in rolling.macros.items() if each in m) for each in first}) == 2


def test_a_replica_that_leaves_finishes_what_it_has() -> None:
    rolling = scheduler(2, Bounds(1, 4))
    rolling.arrive(PrefillDemand("a", 0.3, 10), 0.0)
    rolling.member("u1").admitted("x", 5, 0.1, 0.0)
    name, _ = rolling.shrink(0.1)
    assert name == "u1", "it has promised least"
    assert rolling.drained() == []
    assert [m.name for _, m in rolling.arrive(PrefillDemand("b", 0.3, 10), 0.1)] == ["u0"]
    rolling.member("u1").prefilled("x", 0.2)
    rolling.member("u1").left("x", 0.3)
    assert rolling.drained() == ["u1"]
    with pytest.raises(KeyError):
        rolling.member("u1")


def test_what_waits_survives_the_end_of_its_macro_instance() -> None:
    rolling = scheduler(1, Bounds(1, 4))
    rolling.arrive(PrefillDemand("a", 0.9, 10), 0.0)
    rolling.arrive(PrefillDemand("b", 0.9, 10), 0.0)
    assert rolling.gone("u0", 0.1) == []
    assert rolling.waiting == 1
    assert rolling.arrive(PrefillDemand("c", 0.9, 10), 0.1) == []
    assert rolling.cancel("c")
    assert [d.request_id for d, _ in rolling.grow(MacroMember("u1", 1000, 0.1), 0.2)] == ["b"]
    assert rolling.waiting == 0


def test_there_is_a_time_to_look_again() -> None:
    rolling = scheduler(1, Bounds(1, 4))
    assert rolling.due(0.0) is None
    rolling.arrive(PrefillDemand("a", 0.9, 10), 0.0)
    rolling.arrive(PrefillDemand("b", 0.4, 10, arrival=0.0), 0.0)
    due = rolling.due(0.0)
    assert due == pytest.approx(0.6)
    assert rolling.retry(due - 0.01) == []
    assert len(rolling.retry(due + 0.01)) == 1


def test_replicas_are_added_when_too_few_meet_their_objectives() -> None:
    attainment = Attainment(RollingScalingRules(target=0.9, window=10, patience=5, enough=10, idle=0.2, most=3))
    for number in range(9):
        attainment.add(False, float(number) / 10)
    assert attainment.wanted(2, 1.0, 1.0) == 0, "too few to tell"
    attainment.add(True, 1.0)
    assert attainment.share(1.0) == pytest.approx(0.1)
    assert attainment.wanted(3, 1.0, 1.0) == 0, "there may be no more"
    assert attainment.wanted(2, 1.0, 1.0) == 1
    assert attainment.wanted(3, 1.0, 2.0) == 0, "patience"
    for number in range(20):
        attainment.add(True, 12.0 + number / 10)
    assert attainment.wanted(3, 0.5, 14.0) == 0, "they are busy"
    assert attainment.wanted(3, 0.1, 14.0) == -1
    assert attainment.wanted(1, 0.1, 30.0) == 0, "what was seen is too long ago"


def test_a_backlog_calls_for_more_before_anybody_has_missed_anything() -> None:
    attainment = Attainment(RollingScalingRules(patience=5, backlog=2.0, growth=0.25, most=17))
    assert attainment.wanted(8, 1.0, 0.0, waiting=16) == 0
    assert attainment.wanted(8, 1.0, 1.0, waiting=17) == 2
    assert attainment.wanted(10, 1.0, 2.0, waiting=100) == 0
    assert attainment.wanted(16, 1.0, 10.0, waiting=100) == 1, "there may be 17"
    assert attainment.wanted(17, 1.0, 20.0, waiting=100) == 0


@pytest.mark.parametrize("wrong", [{"target": 0.0}, {"window": 0.0}, {"least": 3, "most": 2}, {"enough": 0}])
def test_scaling_rules_must_make_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"target|least"):
        RollingScalingRules(**wrong)  # type: ignore[arg-type]


def test_a_replica_may_be_told_to_go_and_to_stay() -> None:
    rolling = scheduler(3, Bounds(1, 4))
    rolling.arrive(PrefillDemand("a", 0.9, 10), 0.0)
    assert rolling.drain("u0", 0.0) == []
    assert [member.name for _, member in rolling.arrive(PrefillDemand("b", 0.3, 10), 0.0)] == ["u1"]
    rolling.resume("u0", 0.1)
    assert not rolling.member("u0").leaving
    assert [member.name for member in rolling.macros["m1"].ring] == ["u1", "u2", "u0"]
    with pytest.raises(KeyError):
        rolling.resume("u0", 0.1)
    for name in ("u0", "u1", "u2"):
        rolling.drain(name, 0.2)
    assert rolling.arrive(PrefillDemand("c", 0.3, 10), 0.2) == []
    assert [demand.request_id for demand in rolling.waiters()] == ["c"]
    assert [member.name for _, member in rolling.resume("u1", 0.3)] == ["u1"]


def test_a_replica_that_is_found_draining_gets_nothing() -> None:
    rolling = scheduler(0, Bounds(1, 4))
    rolling.found_draining(MacroMember("u0", 1000, SLO.tpot))
    assert rolling.arrive(PrefillDemand("a", 0.3, 10), 0.0) == []
    assert rolling.member("u0").leaving
    assert rolling.drained() == ["u0"]


def test_who_waits_goes_by_rank_then_by_arrival() -> None:
    rolling = scheduler(0, Bounds(1, 4))
    for name, arrival, rank in (("c", 2.0, 0), ("b", 1.0, 0), ("a", 3.0, 1)):
        rolling.arrive(PrefillDemand(name, 0.1, 10, arrival, rank), 3.0)
    sent = rolling.grow(MacroMember("u0", 1000, SLO.tpot), 3.0)
    assert [demand.request_id for demand, _ in sent] == ["a", "b", "c"]
    rolling.arrive(PrefillDemand("x", 0.9, 2000, 4.0), 4.0)
    for name, arrival, rank in (("c", 4.2, 0), ("b", 4.1, 0), ("a", 4.3, 1)):
        rolling.arrive(PrefillDemand(name, 0.1, 2000, arrival, rank), 4.0)
    assert [demand.request_id for demand in rolling.waiters()] == ["a", "x", "b", "c"]


def test_without_any_load_replicas_go_one_after_the_other() -> None:
    attainment = Attainment(RollingScalingRules(idle=0.1, patience=5.0))
    wanted = [attainment.wanted(3, 0.0, float(second)) for second in range(11)]
    assert wanted == [-1, 0, 0, 0, 0, -1, 0, 0, 0, 0, -1]
    attainment.add(False, 12.0)
    assert attainment.wanted(3, 0.0, 16.0) == 0, "of few, all must have met theirs"
