"""Requests that move between two units while anything dies: none is lost, none is served twice, nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.unit import reconcile
from tests.support.thoroughness import cases, examples
from tests.unit.world import World

PARTS = ("prefill", "decode", "migrator", "memory", "unit")
seeds = st.integers(0, 1 << 32)
# By the round: a request that its client cancels, or a part of a unit that dies.
Events = dict[int, list[tuple[str, ...]]]


def load(world: World, requests: int = 4) -> None:
    for index in range(requests):
        world.submit(f"r{index}", world.random.choice(["u0", "u1"]), world.random.randint(1, 80))


def play(world: World, rounds: int, events: Events) -> None:
    """Deliver messages and let time pass; pairs are repeated as a global scheduler does."""
    for turn in range(rounds):
        if turn % 100 == 0:
            there = world.random.choice([("u0", "u1"), ("u1", "u0")])
            world.pair(*there)
        for event in events.get(turn, []):
            if event[0] == "cancel":
                world.cancel(event[1])
            else:
                world.kill(world.units[event[0]], event[1])
        if not world.deliver() or world.random.random() < 0.3:
            world.pass_time(world.random.choice([0.001, 0.003, 0.01]))


def play_out(world: World, events: Events | None = None) -> None:
    """Play, until every request has come to its end."""
    play(world, 900, events or {})
    world.settle()
    world.check_end()


def deaths_and_cancellations(drawn: random.Random, parts: Sequence[str]) -> Events:
    events: Events = {}
    for _ in range(drawn.randint(1, 4)):
        events.setdefault(drawn.randint(20, 800), []).append((drawn.choice(["u0", "u1"]), drawn.choice(parts)))
    for _ in range(drawn.randint(0, 3)):
        events.setdefault(drawn.randint(20, 800), []).append(("cancel", f"r{drawn.randint(0, 3)}"))
    return events


@settings(max_examples=examples(25), deadline=None)
@given(seed=seeds)
def test_requests_move_to_and_fro_and_end_with_all_their_tokens(seed: int) -> None:
    world = World(seed)
    load(world)
    play_out(world)
    assert world.resubmitted == 0, "nothing died"
    moved = [unit.scheduler.ledger.models[0].tally for unit in world.units.values()]
    # The last word of one that ends at once may come after its last token.
    assert sum(t.moved_in for t in moved) == sum(t.moved_out for t in moved) >= world.took_over


def test_the_world_has_moves_in_it() -> None:
    """Else nothing would have been shown above."""
    moves = 0
    for seed in range(5):
        world = World(seed)
        load(world)
        play(world, 900, {})
        moves += world.took_over
    assert moves > 10


@settings(max_examples=examples(25), deadline=None)
@given(seed=seeds)
def test_refused_moves_leave_requests_where_they_are(seed: int) -> None:
    world = World(seed, refusals=0.5)
    load(world)
    play_out(world)
    assert world.resubmitted == 0


@pytest.mark.parametrize("part", PARTS)
@settings(max_examples=examples(20), deadline=None)
@given(seed=seeds, at=st.integers(20, 700), unit=st.sampled_from(["u0", "u1"]))
def test_any_process_dies_at_any_moment(part: str, seed: int, at: int, unit: str) -> None:
    world = World(seed)
    load(world)
    play_out(world, {at: [(unit, part)]})


@settings(max_examples=examples(40), deadline=None)
@given(seed=seeds)
def test_many_die_and_clients_go_away(seed: int) -> None:
    drawn = random.Random(seed)
    events = deaths_and_cancellations(drawn, PARTS)
    world = World(seed, refusals=drawn.choice([0.0, 0.0, 0.3]), traced=drawn.choice([False, True]))
    load(world)
    play_out(world, events)


# ---------------------------------------------------------------- engines that lose requests without a word


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are asked for what they have all the time."""
    monkeypatch.setattr(reconcile, "RECONCILE_SECONDS", 0.003)


# Policies that take any shape, with models of one engine; rolling is for these alone.
ONE = cases(
    [("rolling", "one"), *((policy, "one") for policy in ("free", "slack", "adbs", "fcfs"))],
    [("rolling", "one"), ("free", "one"), ("slack", "one")],
)
ANY = [("adbs", "split"), *ONE]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(("policy", "shape"), ANY)
def test_messages_that_cross_are_no_loss(policy: str, shape: str) -> None:
    for seed in range(25):
        world = World(seed, policy=policy, shape=shape)
        load(world)
        drawn = random.Random(seed)
        cancels = {drawn.randint(20, 800): [("cancel", f"r{drawn.randint(0, 3)}")] for _ in range(drawn.randint(0, 3))}
        play_out(world, {at: list(each) for at, each in cancels.items()})
        assert world.resubmitted == 0, "nothing was lost"
        for unit in world.units.values():
            found = unit.scheduler.engines.reconciliation
            assert not found.missing
            assert not found.strays


@pytest.mark.parametrize(("policy", "shape"), ANY)
def test_requests_that_engines_forget_are_served_again(policy: str, shape: str) -> None:
    forgotten = missing = 0
    for seed in range(25):
        drawn = random.Random(seed)
        events: Events = {}
        for _ in range(drawn.randint(1, 3)):
            what = drawn.choice(["some requests", "some requests", "migrator", "memory", "unit"])
            events.setdefault(drawn.randint(20, 800), []).append((drawn.choice(["u0", "u1"]), what))
        world = World(seed, policy=policy, shape=shape)
        load(world)
        play_out(world, events)
        forgotten += world.forgotten
        missing += sum(unit.scheduler.engines.reconciliation.missing.total() for unit in world.units.values())
    assert 0 < missing <= forgotten


# ---------------------------------------------------------------- one engine of both phases

PARTS_OF_BOTH = ("both", "migrator", "memory", "unit")


@pytest.mark.parametrize(("policy", "shape"), ONE)
def test_requests_move_between_engines_of_both_phases(policy: str, shape: str) -> None:
    moves = 0
    for seed in range(8):
        world = World(seed, policy=policy, shape=shape)
        load(world)
        play_out(world)
        assert world.resubmitted == 0, "nothing died"
        moves += world.took_over
    assert moves > 8


@pytest.mark.parametrize(("policy", "shape"), ONE)
@settings(max_examples=examples(20), deadline=None)
@given(seed=seeds)
def test_many_parts_of_units_with_one_engine_die(policy: str, shape: str, seed: int) -> None:
    drawn = random.Random(seed)
    events = deaths_and_cancellations(drawn, PARTS_OF_BOTH)
    world = World(seed, refusals=drawn.choice([0.0, 0.0, 0.3]), policy=policy, shape=shape)
    load(world)
    play_out(world, events)


@settings(max_examples=examples(20), deadline=None)
@given(seed=seeds)
def test_a_global_scheduler_knows_what_a_rolling_replica_has(seed: int) -> None:
    """As far as it was told: each report follows from the one before, and then says it all."""
    drawn = random.Random(seed)
    world = World(seed, policy="rolling", shape="one")
    load(world)
    looked = 0
    for _ in range(30):
        event = (drawn.choice(["u0", "u1"]), drawn.choice(PARTS_OF_BOTH))
        play(world, 40, {20: [event]} if drawn.random() < 0.1 else {})
        for unit in world.units.values():
            scheduler = unit.scheduler
            (each,) = scheduler.ledger.models
            up = each.up and scheduler.ledger.memory_up and unit.known_of == scheduler.epoch
            if up and each.journal == []:
                unit.check_known()
                looked += 1
    assert looked > 0
    world.settle()
    world.check_end()


# ---------------------------------------------------------------- requests that make their engines fail


@pytest.mark.parametrize(("policy", "shape"), ANY)
@pytest.mark.parametrize("way", ["raise", "crash"])
@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds)
def test_poison_ends_with_an_error_and_all_others_are_served(policy: str, shape: str, way: str, seed: int) -> None:
    world = World(seed, policy=policy, shape=shape)
    load(world, 6)
    for index in world.random.sample(range(6), world.random.randint(1, 2)):
        # Such as fail at a token that they come to.
        world.poison[f"r{index}"] = (way, world.random.randrange(world.clients[f"r{index}"].most))
    play_out(world)
    assert {r for r, client in world.clients.items() if client.failed} == set(world.poison)
    # Two failures among others and one alone each. A crash while a lease is on its way may be that of the one before,
    # and does not tell as much; one that is heard late tells nothing.
    assert world.failures <= (3 if way == "raise" else 6) * len(world.poison) + world.late
    # Everybody else is whole.
    assert all(len(c.got) == c.most for r, c in world.clients.items() if r not in world.poison)


@settings(max_examples=examples(25), deadline=None)
@given(seed=seeds)
def test_engines_that_are_killed_over_and_over_condemn_nobody(seed: int) -> None:
    world = World(seed)
    load(world, 6)
    drawn = random.Random(seed)
    deaths: Events = {
        turn: [(drawn.choice(["u0", "u1"]), drawn.choice(["prefill", "decode"]))] for turn in range(60, 900, 60)
    }
    play_out(world, deaths)
    assert not [r for r, client in world.clients.items() if client.failed]
