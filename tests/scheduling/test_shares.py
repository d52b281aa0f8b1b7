"""Shares per lease: what the ledger holds of them, and how `slack` divides a unit."""

from __future__ import annotations

from hypothesis import Phase as Phases
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policies import make_policy
from muxserve.scheduling.slack import Slack, SlackConfig
from muxserve.scheduling.types import WHOLE, Grant, Phase, PoolProfile, QueuedRequest, StepsDone
from tests.scheduling.machine import Job, Machine, profile
from tests.scheduling.test_policies import Table
from tests.scheduling.test_properties import models, requests
from tests.support.thoroughness import examples


def lease(book: UnitLedger, share: float, lease_id: int, now: float = 0.0) -> None:
    book.granted(Grant("a", Phase.DECODE, 8, 1.0, int(share * WHOLE)), lease_id, now)


def test_a_smaller_share_frees_the_rest_only_when_the_engine_has_met_it() -> None:
    book = UnitLedger([profile("a")], [PoolProfile("pool", 400)])
    book.engine_up("a", Phase.DECODE, 0.0)
    lease(book, 0.8, 1)
    lease(book, 0.3, 2)
    lease(book, 0.5, 3)
    assert book.share_free == WHOLE // 5
    book.stepped("a", Phase.DECODE, StepsDone(1, 4, 0.01, 2, 1), 0.1)
    assert book.share_free == WHOLE // 5, "that report is of the lease before"
    book.stepped("a", Phase.DECODE, StepsDone(2, 8, 0.0, 0, 1, steps=0), 0.1)
    assert book.share_free == WHOLE // 2
    book.lease_void("a", Phase.DECODE, 0.2)
    assert book.share_free == WHOLE


def test_a_lone_prefill_and_then_a_lone_decode_have_the_whole_unit() -> None:
    table = Table(Slack(), profile("a", prefill_share=0.5, decode_share=0.3), profile("b"))
    table.arrive("r0", "a")
    (prefill,) = table.decide(0.0)
    assert (prefill.phase, prefill.share) == (Phase.PREFILL, WHOLE)
    (decode,) = table.step("a", Phase.PREFILL, 0.01, left=0, handed=("r0",))
    assert (decode.phase, decode.share) == (Phase.DECODE, WHOLE)


def test_a_prompt_takes_from_decode_what_is_above_its_planned_share() -> None:
    table = Table(Slack(), profile("a", prefill_share=0.5, decode_share=0.3))
    (first,) = table.decoding("r0", "a")
    assert first.share == WHOLE
    table.arrive("r1", "a")
    (smaller,) = table.decide(0.1)
    assert (smaller.phase, smaller.share) == (Phase.DECODE, int(0.3 * WHOLE))
    assert not table.decide(0.1), "the rest is not free before the engine has met the smaller lease"
    (prefill,) = table.step("a", Phase.DECODE, 0.11, left=smaller.steps, tokens=0, seconds=0.0)
    assert (prefill.phase, prefill.share) == (Phase.PREFILL, int(0.7 * WHOLE))


def test_shares_follow_a_hand_over_with_the_next_decision() -> None:
    table = Table(Slack(), profile("a"), profile("b"))
    table.decoding("r", "a")
    table.decoding("s", "b", 0.01)
    (joins,) = table.step("a", Phase.DECODE, 0.012, left=50)
    assert (joins.model, joins.share) == ("b", int(0.37 * WHOLE))
    assert [(grant.model, grant.share) for grant in table.decide(0.013)] == [("a", WHOLE // 2)], "s counts now"


def test_decode_engines_that_waited_too_long_share_the_unit_with_a_prefill_whatever_was_planned() -> None:
    profiles = [profile(name, prefill_share=1.0, decode_share=1.0) for name in "abc"]
    models = UnitLedger(profiles, [PoolProfile("pool", 2000)]).models
    division = Slack()._divide(models[0], models, certain=3, gives_way=True)
    assert division.prefill > 0
    assert set(division.decode) == {0, 1, 2}
    assert min(division.decode.values()) > 0
    assert division.prefill + sum(division.decode.values()) == WHOLE


def test_decode_engines_divide_the_unit_by_the_sequences_in_their_batches() -> None:
    profiles = [profile("a", decode_share=0.2), profile("b", decode_share=0.6)]
    book = UnitLedger(profiles, [PoolProfile("pool", 2000)])
    for lease_id, (name, count) in enumerate({"a": 20, "b": 2}.items(), 1):
        ids = tuple(f"{name}{number}" for number in range(count))
        for request_id in ids:
            book.taken_over(QueuedRequest(request_id, name, 20, 50, 0.0, output_tokens=1), 0.0)
        book.granted(Grant(name, Phase.DECODE, 8, 1.0, WHOLE // 4, ids), lease_id, 0.0)
    models = book.models
    division = Slack()._divide(None, models, certain=0, gives_way=True)
    least = SlackConfig().least
    above = [division.decode[m.index] - least * m.decode.share for m in models]
    assert sum(division.decode.values()) == WHOLE
    # 20 and 2 sequences are of the orders 32 and 4.
    assert abs(above[0] - 8 * above[1]) <= 0.1 * WHOLE


def shared_out(machine: Machine, grants: list[Grant]) -> None:
    """Leases fit the unit, nobody has less than the least, and nothing is idle while somebody could use it."""
    ledger = machine.ledger
    leases = [(engine, engine.lease) for model in ledger.models for engine in model.engines if engine.lease is not None]
    assert sum(lease.share for _, lease in leases) <= WHOLE
    assert ledger.share_used <= WHOLE
    if not leases:
        return
    whole = sum(engine.share for engine, _ in leases)
    waits = any(lease.held != lease.share for _, lease in leases)
    for engine, lease in leases:
        least = engine.share * (0.5 if engine.phase is Phase.PREFILL else SlackConfig().least)
        assert lease.share >= least - WHOLE // 50 or whole > 0.99 * WHOLE or len(leases) < 2 or waits
    ready = [m.name for m in ledger.models if m.decode.ready(machine.now)]
    if not waits and not ready and all(lease.renewable for _, lease in leases):
        assert ledger.share_free < WHOLE // 50, f"{ledger.share_free} idle at {machine.now}: {machine.describe()}"


@settings(max_examples=examples(40), deadline=None, phases=[Phases.explicit, Phases.reuse, Phases.generate])
@given(data=st.data())
def test_shares_are_within_the_unit_and_none_of_it_is_idle(data: st.DataObject) -> None:
    profiles, pages = data.draw(models("slack", elastic=True))
    machine = Machine(Slack(), profiles, pages)
    for job in data.draw(requests([p.name for p in profiles])):
        machine.submit(job)
    machine.watch = shared_out
    machine.run()
    assert not machine.unfinished()


@settings(max_examples=examples(40), deadline=None, phases=[Phases.explicit, Phases.reuse, Phases.generate])
@given(data=st.data())
def test_prefill_ends_where_engines_can_have_it(data: st.DataObject) -> None:
    steps = data.draw(st.sampled_from([2, 4, 5, 8]))
    profiles, pages = data.draw(models("slack", elastic=True))
    machine = Machine(make_policy("slack", steps), profiles, pages)
    for job in data.draw(requests([p.name for p in profiles])):
        machine.submit(job)

    def settled(machine: Machine, _: list[Grant]) -> None:
        engines = [engine for model in machine.ledger.models for engine in model.engines]
        leases = [engine.lease for engine in engines if engine.lease is not None]
        prefill = [lease.share for lease in leases if lease.phase is Phase.PREFILL]
        # While shares change a part of the unit may still be another's.
        if prefill and len(leases) > 1 and sum(lease.share for lease in leases) == WHOLE:
            assert prefill[0] % (WHOLE // steps) == 0

    machine.watch = settled
    machine.run()
    assert not machine.unfinished()


def test_shares_that_are_fixed_are_the_planned_ones() -> None:
    machine = Machine(Slack(), [profile("a", elastic=False), profile("b", elastic=False)], 800)
    granted: list[Grant] = []
    machine.watch = lambda _, grants: granted.extend(grants)
    for index in range(20):
        machine.submit(Job(f"r{index}", "ab"[index % 2], 40, 10, 0.01 * index))
    machine.run()
    assert {grant.share for grant in granted} == {WHOLE // 2}


def test_under_backlog_a_small_prefill_is_held_back_while_decode_runs_and_not_for_longer_than_the_slack() -> None:
    table = Table(Slack(), profile("a", max_num_seqs=3, quota_pages=2000, max_num_batched_tokens=256))
    table.decoding("r0", "a")
    table.decoding("r1", "a")
    for index in range(2, 6):
        table.arrive(f"r{index}", "a", now=0.1)
    # There is one seat, and more would like it.
    assert not any(grant.admit for grant in table.decide(0.1))
    end = 0.1 + SlackConfig().slack
    assert table.policy.wakeup(table.ledger, 0.1) <= end
    (smaller,) = table.decide(end + 0.001)
    assert smaller.share < WHOLE
    grants = table.step("a", Phase.DECODE, end + 0.002, left=smaller.steps, tokens=0, seconds=0.0)
    assert [grant.admit for grant in grants if grant.phase is Phase.PREFILL] == [("r2",)]


def test_without_backlog_no_prefill_is_held_back() -> None:
    table = Table(Slack(), profile("a", max_num_seqs=64, quota_pages=2000))
    table.decoding("r0", "a")
    table.arrive("r1", "a", now=0.1)
    (smaller,) = table.decide(0.1)
    assert smaller.share < WHOLE


def test_a_large_batch_holds_no_prefill_back_where_shares_are_fixed() -> None:
    for elastic, admitted in ((True, []), (False, [("r1",)])):
        one = profile("a", max_num_seqs=8, quota_pages=2000, max_num_batched_tokens=2048, elastic=elastic)
        table = Table(Slack(), one)
        table.decoding("r0", "a")
        table.arrive("r1", "a", now=0.1)
        assert [grant.admit for grant in table.decide(0.1) if grant.phase is Phase.PREFILL] == admitted
