"""Pairs, and the request that moves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.replicas.decisions import Pair, Unpair
from muxserve.replicas.migration import MigrationRules, Pairing, choose_request
from muxserve.replicas.priorities import DEFAULT_LEVELS
from muxserve.replicas.views import InstanceLoad, InstanceView
from muxserve.replicas.virtual_usage import freeness_with, score
from tests.replicas.support import CAPACITY, THREE, freeness_of, instances, load, rebalance, request
from tests.support.thoroughness import examples

RULES = MigrationRules(source_below=50, destination_above=100)


def with_freeness(name: str, freeness: float, **more: object) -> InstanceLoad:
    made = load(name, int(CAPACITY - freeness), 1, **more)
    assert made.freeness == freeness
    return made


def test_lowest_is_paired_with_highest() -> None:
    loads = [with_freeness(n, f) for n, f in (("a", 40), ("b", -500), ("c", 7_000), ("d", 300), ("e", 75), ("f", 10))]
    # f finds nobody: there are two destinations, and e is neither too full nor free enough.
    assert Pairing(RULES).round(loads) == [Pair("b", "c"), Pair("f", "d")]


def test_a_pair_ends_when_either_is_back_within_the_thresholds() -> None:
    pairing = Pairing(RULES)
    assert pairing.round([with_freeness("a", 0), with_freeness("b", 200)]) == [Pair("a", "b")]
    assert pairing.round([with_freeness("a", 20), with_freeness("b", 150)]) == []
    assert pairing.round([with_freeness("a", 50), with_freeness("b", 150)]) == [Unpair("a")]
    assert pairing.round([with_freeness("a", 20), with_freeness("b", 150)]) == [Pair("a", "b")]
    assert pairing.round([with_freeness("a", 20), with_freeness("b", 100)]) == [Unpair("a")]


def test_a_pair_ends_when_one_is_gone_and_changes_when_another_is_freer() -> None:
    pairing = Pairing(RULES)
    pairing.round([with_freeness("a", 0), with_freeness("b", 200)])
    assert pairing.round([with_freeness("a", 0), with_freeness("b", 200), with_freeness("c", 900)]) == [Pair("a", "c")]
    assert pairing.round([with_freeness("a", 0)]) == [Unpair("a")]


def test_a_terminating_instance_is_a_source_and_never_a_destination() -> None:
    pairing = Pairing(RULES)
    going = score(InstanceLoad("g", CAPACITY, used=10, running=1, terminating=True), DEFAULT_LEVELS)
    assert pairing.round([going, load("free")]) == [Pair("g", "free")]
    assert pairing.round([going, with_freeness("a", -20)]) == [Unpair("g")]


def test_low_priority_moves_before_short_and_short_before_long() -> None:
    view = InstanceView(
        "s",
        CAPACITY,
        running=[request("high", 10, "high"), request("long", 6_000), request("short", 2_900), request("mid", 3_000)],
    )
    empty = load("d")
    order = []
    while (chosen := choose_request(view, empty, MigrationRules(9_000, 9_000), DEFAULT_LEVELS)) is not None:
        order.append(chosen.request_id)
        view.running = [each for each in view.running if each is not chosen]
        empty = load("d")
    # The destination must stay free enough: the long one would leave less than 9,000.
    assert order == []
    rules, order = MigrationRules(3_000, 3_000), []
    for _ in range(3):
        chosen = choose_request(view, empty, rules, DEFAULT_LEVELS)
        assert chosen is not None
        order.append(chosen.request_id)
        chosen.movable = False
    assert order == ["short", "mid", "long"]


def test_nothing_moves_to_an_instance_that_cannot_hold_it() -> None:
    view = InstanceView("s", CAPACITY, running=[request("a", 5_000), request("b", 4_990)])
    full = load("d", 5_005, 1)
    chosen = choose_request(view, full, MigrationRules(0.5, 1), DEFAULT_LEVELS, growth=0)
    assert chosen is None or chosen.usage <= full.room
    view.terminating = True
    assert choose_request(view, full, RULES, DEFAULT_LEVELS).request_id == "b"  # type: ignore[union-attr]
    assert choose_request(view, full, RULES, DEFAULT_LEVELS, growth=16) is None
    queued = load("d", 3_000, 1, waiting=1, head_demand=2_500, queued_demand=2_500)
    assert choose_request(view, queued, RULES, DEFAULT_LEVELS) is None


def test_nothing_moves_when_its_coming_would_make_the_destination_a_source() -> None:
    view = InstanceView("s", CAPACITY, running=[request("a", 9_990)])
    assert choose_request(view, load("d"), RULES, DEFAULT_LEVELS) is None


def test_no_more_in_flight_than_allowed_on_either_side() -> None:
    running = [request(str(n), 1_100) for n in range(9)]
    view = InstanceView("s", CAPACITY, running=running, moving_out=1)
    assert choose_request(view, load("d"), RULES, DEFAULT_LEVELS) is None
    two = MigrationRules(50, 100, in_flight=2)
    view.capacity = 9_900
    assert choose_request(view, load("d", moving_in=1), two, DEFAULT_LEVELS) is not None
    assert choose_request(view, load("d", moving_in=2), two, DEFAULT_LEVELS) is None
    view.moving_out = 2
    assert choose_request(view, load("d"), two, DEFAULT_LEVELS) is None


def test_thresholds_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="source and destination at once"):
        MigrationRules(source_below=10, destination_above=9)
    with pytest.raises(ValueError, match="in_flight"):
        MigrationRules(in_flight=0)


@given(st.lists(st.tuples(st.integers(-2_000, 9_999), st.booleans()), max_size=12))
def test_pairs_are_of_sources_with_destinations_each_once(states: list[tuple[int, bool]]) -> None:
    loads = [
        score(InstanceLoad(f"i{n}", CAPACITY, used=CAPACITY - f, running=1, terminating=t), DEFAULT_LEVELS)
        for n, (f, t) in enumerate(states)
    ]
    by_name = {each.name: each for each in loads}
    pairing = Pairing(RULES)
    pairing.round(loads)
    assert len(set(pairing.pairs.values())) == len(pairing.pairs)
    sources = sorted(each.freeness for each in loads if each.freeness < RULES.source_below)
    for source, destination in pairing.pairs.items():
        assert by_name[source].freeness < RULES.source_below
        assert by_name[destination].freeness > RULES.destination_above
        assert not by_name[destination].terminating
    # The most loaded ones are served, when not all can be.
    chosen = sorted(by_name[source].freeness for source in pairing.pairs)
    assert chosen == sources[: len(chosen)]


@given(instances("s"), instances("d"))
def test_what_is_chosen_fits_and_leaves_the_destination_free_enough(one: InstanceView, other: InstanceView) -> None:
    there = score(other.load(), THREE)
    chosen = choose_request(one, there, RULES, THREE)
    if chosen is None:
        return
    assert not other.terminating
    assert chosen.usage <= there.room
    if not one.terminating:
        assert freeness_of(one, THREE) < RULES.source_below
        assert freeness_with(there, THREE, chosen.usage, chosen.execution) >= RULES.source_below
    lower = [r for r in one.running if THREE[r.execution].rank < THREE[chosen.execution].rank and r.usage <= there.room]
    for each in lower:
        assert not one.terminating
        assert freeness_with(there, THREE, each.usage, each.execution) < RULES.source_below


@settings(max_examples=examples(60))
@given(st.lists(instances(), min_size=2, max_size=6))
def test_requests_come_to_rest(views: list[InstanceView]) -> None:
    for number, view in enumerate(views):
        view.name = f"i{number}"
    before = sum(len(view.running) + len(view.waiting) for view in views)
    rebalance(views, RULES)
    assert sum(len(view.running) + len(view.waiting) for view in views) == before
