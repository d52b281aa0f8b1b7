"""Where decodes of a member that leaves go."""

from __future__ import annotations

import pytest

from muxserve.rolling.draining import destinations, takes
from muxserve.rolling.member import LatencyTargets, MacroMember

SLO = LatencyTargets(ttft=1.0, tpot=0.1)


def member(name: str, decodes: int = 0, pending: float = 0.0, tokens: int = 100, capacity: int = 1000) -> MacroMember:
    """With so many decodes that have saved nothing at time 0."""
    made = MacroMember(name, capacity, SLO.tpot)
    for number in range(decodes):
        made.found(f"{name}/{number}", tokens, 0.0, 0.0)
    if pending:
        made.admitted(f"{name}/p", 10, pending, 0.0)
    return made


def chosen(source: MacroMember, *others: MacroMember, now: float = 0.0, before: str = "") -> str:
    known = {source.name: before} if before else {}
    return destinations([source], others, SLO, now, known, lambda a, b: True).get(source.name, "")


def test_the_one_with_the_least_pending_then_with_most_memory_left() -> None:
    source = member("s", 2)
    source.stepped(20)
    assert chosen(source, member("a", 3), member("b", 2), member("c", pending=0.1)) == "b"
    assert chosen(source, member("a", pending=0.2), member("c", 5, pending=0.1)) == "c"


def test_there_must_be_room_for_the_least_of_them() -> None:
    source = member("s", 1)
    source.found("small", 40, 0.0, 0.0)
    assert takes(member("a", 9, capacity=940), source, SLO, 0.0)
    assert not takes(member("a", 9, capacity=939), source, SLO, 0.0)


def test_they_do_not_wait_longer_for_prefills_than_they_have_saved() -> None:
    source = member("s", 2)
    busy = member("a", pending=0.3)
    assert not takes(busy, source, SLO, 0.0)
    source.stepped(3)
    assert takes(busy, source, SLO, 0.0)
    assert not takes(busy, source, SLO, 0.01)
    # Late as they are, they may go where nothing is pending.
    assert takes(member("b"), source, SLO, 5.0)


def test_those_that_are_late_already_get_no_company() -> None:
    source, late = member("s", 1), member("a", 1)
    assert takes(late, source, SLO, 0.0)
    assert not takes(late, source, SLO, 0.1)
    late.stepped()
    assert takes(late, source, SLO, 0.1)


def test_by_the_quantile_where_that_is_what_counts() -> None:
    source, mixed = member("s", 1), member("a", 1)
    mixed.stepped(10)
    mixed.found("young", 10, 0.5, 0.5)
    mixed.found("younger", 10, 0.6, 0.6)
    # 1.0 s saved less 0.7 s; a second and a third that have just begun.
    assert takes(mixed, source, SLO, 0.7)
    assert not takes(mixed, source, LatencyTargets(1.0, 0.1, 0.25), 0.7)


def test_who_has_no_decodes_or_leaves_too_is_no_part_of_it() -> None:
    source, other = member("s", 1), member("a")
    assert chosen(member("s", pending=0.5), other) == ""
    assert chosen(source, source) == ""
    other.leaving = True
    assert chosen(source, other) == ""


def test_a_destination_stays_while_it_may() -> None:
    source, first, second = member("s", 1), member("a", 5), member("b")
    assert chosen(source, first, second) == "b"
    assert chosen(source, first, second, before="a") == "a"
    first.capacity = 10
    assert chosen(source, first, second, before="a") == "b"


def test_one_takes_those_of_one_other_and_only_kv_that_is_laid_out_alike() -> None:
    sources = [member("s", 1), member("t", 1)]
    other = [member("a")]

    def pairs(before: dict[str, str]) -> dict[str, str]:
        return destinations(sources, other, SLO, 0.0, before, lambda a, b: True)

    assert pairs({}) == {"s": "a"}
    assert pairs({"t": "a"}) == {"t": "a"}
    assert destinations(sources, other, SLO, 0.0, {}, lambda a, b: a == "t") == {"t": "a"}


@pytest.mark.parametrize("capacity", [0, 50])
def test_a_member_without_memory_takes_nothing(capacity: int) -> None:
    assert chosen(member("s", 1), member("a", capacity=capacity)) == ""
