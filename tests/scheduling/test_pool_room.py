"""How much of the memory that models share their KV pools take: single decisions, properties, and pools of a ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.long_requests import GROWTH_TOKENS
from muxserve.scheduling.pool_room import GIVE_SECONDS, divided, divided_anew, pools_load
from muxserve.scheduling.residency import Residency
from muxserve.scheduling.residency_types import (
    KvRules,
    Residence,
    ResidencyRules,
    Sleep,
    Standing,
    Wake,
    WakeCosts,
    WakeRules,
)
from muxserve.scheduling.types import PoolProfile, QueuedRequest
from muxserve.wire import PoolsLoad
from tests.scheduling.test_ledger import profile
from tests.support.thoroughness import examples

ASLEEP, WAKING, AWAKE, LEAVING = Residence.ASLEEP, Residence.WAKING, Residence.AWAKE, Residence.LEAVING
KV = KvRules(least=5, most=60)


def policy(load: PoolsLoad, **models: WakeCosts) -> Residency:
    """100 bytes, 10 of which are nobody's."""
    made = Residency(ResidencyRules(100, min_residence=2.0, residence_factor=1.0, kv=KV), models)
    made.pools.reported(load)
    return made


# ---------------------------------------------------------------- single decisions


def test_a_wake_takes_what_pools_do_not_need_before_a_model_sleeps() -> None:
    made = policy(PoolsLoad(backed=50, needed=10, wanted=12), a=WakeCosts(30), b=WakeCosts(30))
    standings = [Standing("a", AWAKE, 0.0), Standing("b", ASLEEP, 0.0, waiting=[9.9])]
    assert not [each for each in made.decide(10.0, 10, standings) if isinstance(each, Wake | Sleep)]
    assert made.pools.target == 30
    made.pools.reported(PoolsLoad(target=30, backed=30, needed=10, wanted=12))
    assert Wake("b") in made.decide(10.1, 10, standings)


def test_pools_keep_what_their_requests_need_and_the_least() -> None:
    made = policy(PoolsLoad(backed=50, needed=10, wanted=20), a=WakeCosts(30), b=WakeCosts(40))
    standings = [Standing("a", AWAKE, 0.0), Standing("b", ASLEEP, 0.0, waiting=[9.9])]
    # 25 could come from the pools, and 30 are missing.
    assert Sleep("a", "memory for b") in made.decide(10.0, 10, standings)
    assert made.pools.target is not None
    assert made.pools.target >= 25


def test_chunks_that_are_not_given_back_are_not_waited_for() -> None:
    made = policy(PoolsLoad(backed=50, needed=10, wanted=10), a=WakeCosts(30), b=WakeCosts(30))
    standings = [Standing("a", AWAKE, 0.0), Standing("b", ASLEEP, 0.0, waiting=[9.9])]
    made.decide(10.0, 10, standings)
    # Requests have pages in all chunks.
    made.pools.reported(PoolsLoad(target=30, backed=50, needed=25, wanted=25))
    assert not [each for each in made.decide(10.1, 10, standings) if isinstance(each, Sleep)]
    assert Sleep("a", "memory for b") in made.decide(10.1 + GIVE_SECONDS, 10, standings)


def test_free_memory_is_lent_but_for_that_of_the_next_wake() -> None:
    made = policy(PoolsLoad(backed=5), a=WakeCosts(30), b=WakeCosts(30))
    made.decide(10.0, 10, [Standing("a", AWAKE, 0.0), Standing("b", ASLEEP, 0.0)])
    assert made.pools.target == 30


def test_pools_give_back_what_they_were_lent_for_models_that_are_woken_before_anybody_asks() -> None:
    rules = ResidencyRules(120, min_residence=2.0, residence_factor=1.0, kv=KV, wakes=WakeRules(ahead=True))
    made = Residency(rules, dict.fromkeys("abc", WakeCosts(25)))
    made.pools.reported(PoolsLoad(backed=5))
    standings = {name: Standing(name, ASLEEP, 0.0) for name in "abc"}
    woken = []
    for step in range(6):
        for change in made.decide(10.0 + step, 10, standings.values()):
            assert isinstance(change, Wake), change
            woken.append(change.model)
            standings[change.model] = Standing(change.model, AWAKE, 10.0 + step)
        target = made.pools.target
        assert target is not None
        made.pools.reported(PoolsLoad(target=target, backed=target))
    assert woken == ["a", "b", "c"]
    # What all of them leave.
    assert made.pools.target == 35


def test_requests_that_wait_for_pages_get_free_memory_and_then_that_of_idle_models() -> None:
    made = policy(PoolsLoad(backed=30, needed=20, urgent=55, wanted=55, model="b"), a=WakeCosts(20), b=WakeCosts(30))
    standings = [Standing("a", AWAKE, 0.0), Standing("b", AWAKE, 0.0, running=3)]
    assert made.decide(10.0, 10, standings) == [Sleep("a", "memory for the KV cache of b")]
    assert made.pools.target == 40  # all that was free


def test_a_busy_model_leaves_for_pages_only_when_somebody_has_waited_for_long() -> None:
    load = PoolsLoad(backed=40, needed=20, urgent=55, wanted=55, model="b")
    made = policy(load, a=WakeCosts(20), b=WakeCosts(30))
    standings = [Standing("a", AWAKE, 0.0, running=1), Standing("b", AWAKE, 0.0, running=3)]
    assert made.decide(10.0, 10, standings) == []
    assert made.decide(19.0, 10, standings) == []
    assert made.decide(20.0, 10, standings) == [Sleep("a", "memory for the KV cache of b")]


def test_more_than_the_limit_recalls_what_is_lent_first() -> None:
    made = policy(PoolsLoad(backed=40, needed=5, wanted=5), a=WakeCosts(30), b=WakeCosts(30))
    standings = [Standing("a", AWAKE, 0.0, held=35), Standing("b", AWAKE, 0.0, held=30)]
    assert made.decide(10.0, 10, standings) == []
    assert made.pools.target == 25
    assert made.excess == 0


def test_before_the_pools_have_reported_they_count_whole() -> None:
    made = Residency(ResidencyRules(100, kv=KV), {"a": WakeCosts(40)})
    standings = [Standing("a", ASLEEP, 0.0, waiting=[0.0])]
    assert not [each for each in made.decide(0.1, 10, standings) if isinstance(each, Wake)]
    made.pools.reported(PoolsLoad(backed=60))
    made.decide(0.2, 10, standings)
    made.pools.reported(PoolsLoad(target=50, backed=50))
    assert Wake("a") in made.decide(0.3, 10, standings)


# ---------------------------------------------------------------- properties


@dataclass
class Shared:
    """Models and pools of one memory; times are in rounds of 0.1 s. Chunks come and go a round after they were asked
    for, those in use when their requests end."""

    random: Random
    costs: dict[str, WakeCosts]
    kv: KvRules
    limit: int
    held: int = 0
    backed: int = 0
    room: int = 0
    awake: dict[str, tuple[Residence, float]] = field(default_factory=dict)
    waiting: dict[str, list[float]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)

    def load(self) -> PoolsLoad:
        waits = self.random.choice((0, 0, 3, 20))
        return PoolsLoad(self.room, self.backed, self.held, self.held + waits, self.held + 2 * waits, "m0")

    def resize(self, target: int) -> None:
        self.room = target
        self.backed = max(target, min(self.backed, self.held)) if target < self.backed else target

    def taken(self) -> int:
        return sum(self.costs[name].bytes for name, (where, _) in self.awake.items() if where is not ASLEEP)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 30))
def test_the_limit_holds_and_pools_keep_what_runs(seed: int) -> None:
    random = Random(seed)
    costs = {f"m{n}": WakeCosts(random.randint(10, 30), seconds=0.2, ttft=2.0) for n in range(random.randint(2, 5))}
    largest = max(each.bytes for each in costs.values())
    kv = KvRules(random.randint(1, 5), random.randint(10, 50))
    limit = 10 + kv.least + largest + random.randint(0, 60)
    world = Shared(random, costs, KvRules(kv.least, min(kv.most, limit - 10 - largest)), limit)
    world.backed = world.room = world.kv.most
    world.awake = dict.fromkeys(costs, (ASLEEP, 0.0))
    made = Residency(ResidencyRules(limit, min_residence=0.5, residence_factor=1.0, max_wait=2.0, kv=world.kv), costs)
    made.pools.reported(world.load())
    ordered = world.room
    for number in range(250):
        now = 0.1 * number
        for name in costs:
            if random.random() < 0.1 and number < 180:
                world.waiting.setdefault(name, []).append(now)
                made.arrived(name, now)
        # Requests of awake models take pages and give them back.
        room = max(0, world.room - world.held)
        busy = any(world.running.values())
        world.held = max(0, world.held + (random.randint(-6, min(5, room)) if busy else -6))
        for name, (where, since) in world.awake.items():
            if where is WAKING and now - since > 0.25:
                world.awake[name] = AWAKE, now
                made.woke(name, 0.2)
            if where is AWAKE and world.waiting.get(name):
                world.running[name] = world.running.get(name, 0) + len(world.waiting.pop(name))
            if random.random() < 0.3:
                world.running[name] = max(0, world.running.get(name, 0) - 1)
            if where is LEAVING and not world.running.get(name) and now - since > 0.1:
                world.awake[name] = ASLEEP, now
        if random.random() > 0.02:  # else the unit's report is late, or the order to it is lost
            world.resize(ordered)
            load = world.load()
            made.pools.reported(load)
        before = made.pools.target
        standings = [
            Standing(name, where, since, world.running.get(name, 0), world.waiting.get(name, ()))
            for name, (where, since) in world.awake.items()
        ]
        for change in made.decide(now, 10, standings):
            if isinstance(change, Wake):
                world.awake[change.model] = WAKING, now
            elif isinstance(change, Sleep):
                world.awake[change.model] = LEAVING, now
            elif not hasattr(change, "bytes"):
                world.awake[change.model] = AWAKE, now
        assert made.pools.target is not None
        assert before is not None
        assert made.pools.target <= world.kv.most
        if made.pools.target < before:
            assert made.pools.target >= load.wanted + world.kv.least
        ordered = made.pools.target
        # What models and pools have, and are to have, fits.
        assert 10 + world.taken() + max(world.backed, ordered) <= limit
        assert not any(now - min(since) > 20 for since in world.waiting.values()), "nobody waits for ever"


# ---------------------------------------------------------------- what a unit says of its pools


def unit() -> UnitLedger:
    models = [profile("a", tokens=100), profile("b", pool="q", tokens=50)]
    return UnitLedger(models, [PoolProfile("pool", 1000, 100), PoolProfile("q", 500, 10)])


def test_a_unit_says_what_runs_and_waits() -> None:
    ledger = unit()
    a = ledger.by_name["a"]
    usual = a.blocks_of(100) * a.pages_per_block
    b = ledger.by_name["b"]
    ledger.pages("a", 40, 0, 900)
    ledger.pool_pages("pool", 300, 20, 400, 600)
    load = pools_load(ledger, 7)
    assert (load.target, load.backed, load.model) == (7, 600 * 100 + 500 * 10, "")
    assert load.needed == (40 + usual) * 100 + b.blocks_of(50) * b.pages_per_block * 10
    assert load.urgent == load.needed
    ledger.arrived(QueuedRequest("r1", "a", 64, 10, 1.0), 1.0)
    more = pools_load(ledger, 7)
    head = ledger.by_name["a"].queue.head()
    assert more.urgent == load.needed + head.blocks * a.pages_per_block * 100
    assert more.wanted >= load.wanted
    assert more.model == "a"
    assert GROWTH_TOKENS > 0


def test_a_model_out_of_service_needs_only_what_it_holds() -> None:
    ledger = unit()
    ledger.by_name["a"].retired = ledger.by_name["b"].retired = True
    ledger.pages("a", 40, 0, 0)
    assert pools_load(ledger, 0).needed == 40 * 100
    assert pools_load(ledger, 0).wanted == 40 * 100


def test_room_is_divided_by_what_pools_need_and_their_sizes() -> None:
    ledger = unit()
    found = divided(ledger, 52_500)
    assert found == {"pool": 500, "q": 250}
    ledger.by_name["a"].retired = True
    ledger.pages("a", 520, 0, 0)
    found = divided(ledger, 52_500)
    assert found["pool"] >= 520
    assert found["pool"] * 100 + found["q"] * 10 <= 52_500
    assert divided(ledger, 10**9) == {"pool": 1000, "q": 500}
    assert min(divided(ledger, 0).values()) >= 1


def test_no_pool_has_more_than_its_pages_however_much_it_needs() -> None:
    """What it cannot have is another pool's."""
    ledger = unit()
    ledger.pages("b", 500, 0, 0)
    assert divided(ledger, 105_000) == {"pool": 1000, "q": 500}


def test_room_that_a_pool_does_not_need_goes_to_one_whose_requests_wait() -> None:
    ledger = unit()
    ledger.pages("b", 480, 0, 0)
    first = divided(ledger, 60_000)
    for name, room in first.items():
        ledger.pool_pages(name, room, 0, room, room)
    # Nobody waits, then somebody whom the room is enough for, and then somebody whom it is not.
    assert divided_anew(ledger, 60_000) is None
    ledger.arrived(QueuedRequest("r1", "a", 16, 10, 1.0), 1.0)
    assert divided_anew(ledger, 60_000) is None
    ledger.pages("b", 0, 0, 0)
    ledger.arrived(QueuedRequest("r2", "a", 16, 10, 1.0), 1.0)
    a = ledger.by_name["a"]
    ledger.pages("a", first["pool"] - a.pages_per_block, 0, 0)
    again = divided_anew(ledger, 60_000)
    assert again is not None
    assert again["pool"] > first["pool"]
    assert again["pool"] * 100 + again["q"] * 10 <= 60_000
