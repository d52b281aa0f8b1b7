"""The virtual token counter: who goes next, and that services stay close (Theorem 4.4 of VTC)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.replicas.priorities import ServiceClass
from muxserve.scheduling.admission import admissible
from muxserve.scheduling.fairness import INPUT, OUTPUT, QueueKey, TenantCounters, TenantService, WaitingTenants
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.types import Grant, Phase, PoolProfile, QueuedRequest, StepsDone
from tests.scheduling.machine import profile
from tests.support.thoroughness import examples

SEATS = 3
LONGEST_PROMPT = 30
LONGEST_ANSWER = 12


class Batching:
    """One model on its two engines: a prefill step, then a decode step, and so on. `service` is what each tenant really
    got."""

    def __init__(self) -> None:
        self.ledger = UnitLedger([profile("a", max_num_seqs=SEATS)], [PoolProfile("pool", 1000)])
        for phase in (Phase.PREFILL, Phase.DECODE):
            self.ledger.engine_up("a", phase, 0.0)
        self.model = self.ledger.by_name["a"]
        self.service: dict[str, float] = {}
        self.left: dict[str, int] = {}
        self.order: list[str] = []
        self.lease = 0
        self.now = 0.0

    def arrive(self, tenant: str, prompt: int, answer: int, weight: float = 1.0, priority: int = 0) -> None:
        request_id = f"{tenant}{len(self.left)}"
        self.left[request_id] = answer
        self.ledger.arrived(
            QueuedRequest(
                request_id, "a", prompt, answer, self.now, ServiceClass(priority, tenant=tenant, weight=weight)
            ),
            self.now,
        )

    def step(self) -> None:
        """Admit what may be, prefill all of it, and decode one token."""
        self.now += 1.0
        admission = admissible(self.ledger, self.model)
        if admission is not None:
            self.lease += 1
            ids = admission.request_ids
            self.order += ids
            self.ledger.granted(Grant("a", Phase.PREFILL, 1, 1.0, 1, ids), self.lease, self.now)
            for request_id in ids:
                live = self.ledger.requests[request_id]
                self._serve(live.tenant, INPUT * live.prompt_tokens)
                self.ledger.handed_over(request_id, self.lease, 0, self.now)
            self.ledger.stepped("a", Phase.PREFILL, StepsDone(self.lease, 0, 0.1, admission.tokens, 0), self.now)
        if self.model.decoding or self.model.handed:
            self.lease += 1
            self.ledger.granted(Grant("a", Phase.DECODE, 1, 1.0, 1, tuple(self.model.handed)), self.lease, self.now)
            inside = list(self.model.decoding.values())
            self.ledger.stepped("a", Phase.DECODE, StepsDone(self.lease, 0, 0.1, len(inside), len(inside)), self.now)
            for live in inside:
                self._serve(live.tenant, OUTPUT)
                self.left[live.request_id] -= 1
                if not self.left[live.request_id]:
                    self.ledger.finished(live.request_id, Phase.DECODE, self.lease, self.now)

    def waiting(self) -> set[str]:
        return {live.tenant for live in self.model.queue.first(10_000)}

    def _serve(self, tenant: str, amount: float) -> None:
        self.service[tenant] = self.service.get(tenant, 0.0) + amount


lengths = st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_ANSWER))
floods = st.lists(lengths, min_size=5, max_size=60)


@settings(max_examples=examples(60), deadline=None)
@given(tenants=st.lists(floods, min_size=2, max_size=4), gaps=st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_services_of_tenants_that_wait_differ_by_no_more_than_the_bound(
    tenants: list[list[tuple[int, int]]], gaps: list[int]
) -> None:
    """Whenever they come, whatever they ask for: over any time in which two of them wait without a break."""
    bound = 2 * max(INPUT * LONGEST_PROMPT, OUTPUT * SEATS * LONGEST_ANSWER)
    machine = Batching()
    lowest: dict[tuple[str, str], float] = {}
    highest: dict[tuple[str, str], float] = {}
    step = 0
    while step <= max(gaps) or machine.ledger.requests:
        for index, flood in enumerate(tenants):
            if gaps[index] == step:
                for prompt, answer in flood:
                    machine.arrive(f"t{index}", prompt, answer)
        waiting = machine.waiting()
        for pair in combinations([f"t{index}" for index in range(len(tenants))], 2):
            if not waiting.issuperset(pair):
                lowest.pop(pair, None)
                highest.pop(pair, None)
                continue
            apart = machine.service.get(pair[0], 0.0) - machine.service.get(pair[1], 0.0)
            lowest[pair] = min(apart, lowest.get(pair, apart))
            highest[pair] = max(apart, highest.get(pair, apart))
            assert highest[pair] - lowest[pair] <= bound
        machine.step()
        step += 1
    # The counters lose nothing of what was served, and lifting only adds to it.
    for tenant, service in machine.service.items():
        assert machine.model.counters.level(tenant) >= service - 1e-6
    assert not machine.model.counters.level("nobody")


def next_of_all(machine: Batching) -> str:
    """The head of the queue as its definition has it: every tenant is looked at."""
    queue, level = machine.model.queue, machine.model.counters.level
    tenants = queue._ranks[queue._order[0]]
    key = min((level(tenant), waiting.keys[0]) for tenant, waiting in tenants.items())[1]
    return queue._requests[key].request_id


actions = st.one_of(
    st.tuples(
        st.just("arrive"),
        st.integers(0, 12),
        lengths,
        st.sampled_from([0.5, 1.0, 2.0, 4.0]),
        st.sampled_from([-1, 0, 0, 0]),
    ),
    st.tuples(st.just("step")),
    st.tuples(st.just("cancel"), st.integers(0, 200)),
    st.tuples(st.just("restart")),
)


@settings(max_examples=examples(200), deadline=None)
@given(history=st.lists(actions, min_size=10, max_size=150))
def test_the_head_is_that_of_the_least_of_all_tenants(history: list[tuple[Any, ...]]) -> None:
    """Whatever happens to requests, weights and engines, the queue says what looking at all of them does."""
    machine = Batching()
    for kind, *rest in history:
        if kind == "arrive":
            tenant, (prompt, answer), weight, priority = rest
            machine.arrive(f"t{tenant}", prompt, answer, weight, priority)
        elif kind == "cancel" and machine.ledger.requests:
            names = sorted(machine.ledger.requests)
            machine.ledger.cancelled(names[rest[0] % len(names)], machine.now)
        elif kind == "restart":
            machine.ledger.engine_down("a", Phase.DECODE, machine.now)
            machine.ledger.engine_up("a", Phase.DECODE, machine.now)
        else:
            machine.step()
        if len(machine.model.queue):
            assert machine.model.queue.head().request_id == next_of_all(machine)
            assert next(iter(machine.model.queue.first(1))) is machine.model.queue.head()
            everyone = [live.request_id for live in machine.model.queue.first(10_000)]
            assert [live.request_id for live in machine.model.queue.first(4)] == everyone[:4]


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_the_least_tenant_is_known_while_counters_grow(data: st.DataObject) -> None:
    rounds = 0.0
    counters = TenantCounters(lambda: rounds)
    waiting = WaitingTenants(counters)
    counters.watch(waiting.changed)
    keys: dict[str, QueueKey] = {}
    since: dict[str, list[float]] = {}
    for number in range(data.draw(st.integers(1, 60))):
        kind = data.draw(st.sampled_from(["put", "put", "grow", "decode", "end", "admit", "weight", "remove"]))
        name = str(data.draw(st.integers(0, 9)))
        if kind == "put":
            keys[name] = (1, 0, data.draw(st.integers(0, 9)), 0.0, number)
            waiting.put(name, keys[name])
        elif kind == "remove":
            keys.pop(name, None)
            waiting.remove(name)
        elif kind == "grow":
            rounds += data.draw(st.integers(0, 7))
        elif kind == "decode":
            since.setdefault(name, []).append(rounds)
            counters.decodes(name, rounds)
        elif kind == "end" and since.get(name):
            counters.decodes_no_more(name, since[name].pop())
        elif kind == "admit":
            counters.admitted(name, data.draw(st.integers(0, 20)))
        elif kind == "weight":
            counters.lift(name, None, data.draw(st.sampled_from([0.5, 1.0, 2.0])))
        if keys:
            order = sorted((counters.level(each), key, each) for each, key in keys.items())
            assert waiting.least() == order[0][2]
            count = data.draw(st.integers(1, 4))
            assert sorted(waiting.first(count))[:count] == order[:count]


def test_of_many_tenants_only_those_that_decode_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [0]
    level = TenantService.level

    def counting(self: TenantService, rounds: float) -> float:
        asked[0] += 1
        return level(self, rounds)

    monkeypatch.setattr(TenantService, "level", counting)
    machine = Batching()
    for number in range(1024):
        machine.arrive(f"t{number}", 10, 3)
        machine.arrive(f"t{number}", 10, 3)
    for _ in range(20):
        machine.step()
    asked[0] = 0
    machine.model.queue.head()
    assert asked[0] <= SEATS
    asked[0] = 0
    list(machine.model.queue.first(1))
    assert asked[0] <= SEATS


def test_without_tenants_a_flood_takes_everything() -> None:
    """What the bound is worth: the same floods as one tenant."""
    machine = Batching()
    for _ in range(40):
        machine.arrive("", 20, 5)
    for _ in range(20):
        machine.step()
    assert machine.service[""] > 2 * max(INPUT * LONGEST_PROMPT, OUTPUT * SEATS * LONGEST_ANSWER)


def test_a_flood_does_not_hold_up_others() -> None:
    machine = Batching()
    for _ in range(20):
        machine.arrive("flood", 10, 2)
    machine.step()
    machine.arrive("other", 10, 2)
    while "other20" not in machine.order:
        machine.step()
    assert machine.order.index("other20") <= SEATS + 1


def test_weights() -> None:
    machine = Batching()
    for _ in range(40):
        machine.arrive("gold", 10, 5, weight=3.0)
        machine.arrive("plain", 10, 5)
    for _ in range(60):
        machine.step()
    assert {"gold", "plain"} <= machine.waiting()
    assert 2.0 < machine.service["gold"] / machine.service["plain"] < 4.0


def test_priority_goes_before_fairness() -> None:
    machine = Batching()
    for _ in range(6):
        machine.arrive("urgent", 10, 2, priority=-1)
    machine.arrive("calm", 10, 2)
    while machine.ledger.requests:
        machine.step()
    assert machine.order[-1].startswith("calm")


def test_what_was_not_used_is_not_saved_up() -> None:
    """A tenant that comes late begins at the level of those that wait, not at nothing."""
    counters = TenantCounters(lambda: 0.0)
    counters.lift("early", None, 1.0)
    counters.admitted("early", 500)
    counters.lift("late", "early", 1.0)
    assert counters.level("late") == 500
    # The queue has emptied: the last that left is who one is measured by.
    counters.admitted("early", 100)
    counters.waits_no_more("late")
    counters.waits_no_more("early")
    counters.lift("third", None, 1.0)
    assert counters.level("third") == 600
    # Never down.
    counters.lift("early", "late", 1.0)
    assert counters.level("early") == 600


def test_what_decodes_counts_while_it_does() -> None:
    rounds = 10.0
    counters = TenantCounters(lambda: rounds)
    counters.lift("one", None, 2.0)
    counters.decodes("one", 10.0)
    counters.decodes("one", 10.0)
    rounds = 13.0
    assert counters.level("one") == OUTPUT * 2 * 3 / 2.0
    counters.decodes_no_more("one", 10.0)
    rounds = 14.0
    assert counters.level("one") == OUTPUT * (3 + 4) / 2.0
    counters.lift("one", None, 4.0)  # another weight changes nothing of what was
    assert counters.level("one") == OUTPUT * (3 + 4) / 2.0
    rounds = 15.0
    assert counters.level("one") == OUTPUT * (7 / 2.0 + 1 / 4.0)
