"""Quotas: the fair division, and how it is followed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.quotas import (
    Claim,
    QuotaAdapter,
    QuotaConfig,
    demand_weight,
    fixed_targets,
    initial_quotas,
    lend,
    max_min,
    normalised_usage,
)
from muxserve.scheduling.types import PoolProfile, QueuedRequest
from tests.scheduling.machine import profile

claims = st.lists(
    st.builds(
        Claim,
        weight=st.floats(0.01, 1000),
        floor=st.integers(0, 50),
        most=st.one_of(st.just(float("inf")), st.floats(0, 5000)),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(drawn=claims, spare=st.integers(0, 5000))
def test_division_is_complete_keeps_floors_and_is_max_min_fair(drawn: list[Claim], spare: int) -> None:
    pages = sum(claim.floor for claim in drawn) + spare
    shares = max_min(pages, drawn)
    assert sum(shares) == pages
    assert all(share >= claim.floor for share, claim in zip(shares, drawn, strict=True))
    satisfied = all(s >= min(c.most, pages) - 1 for s, c in zip(shares, drawn, strict=True))
    if satisfied:
        return
    # While somebody wants more, nobody holds more per weight than the neediest, except by floor.
    level = min((s + 1) / c.weight for s, c in zip(shares, drawn, strict=True) if s < c.most - 1)
    for share, claim in zip(shares, drawn, strict=True):
        assert share <= max(claim.floor, min(claim.most, level * claim.weight)) + 1


def test_division_by_weight() -> None:
    assert max_min(700, [Claim(4, 0), Claim(2, 0), Claim(1, 0)]) == [400, 200, 100]
    assert max_min(700, [Claim(4, 0), Claim(2, 0), Claim(1, 160)]) == [360, 180, 160]
    assert max_min(700, [Claim(4, 0, 100), Claim(2, 0), Claim(1, 0)]) == [100, 400, 200]
    # Nobody needs more: what is left goes back towards the division by weight.
    assert max_min(700, [Claim(4, 0, 10), Claim(2, 0, 10), Claim(1, 0, 10)]) == [400, 200, 100]
    assert max_min(0, []) == []


def test_impossible_divisions_say_why() -> None:
    with pytest.raises(ValueError, match="the pool has 10 pages"):
        max_min(10, [Claim(1, 6), Claim(1, 5)])
    with pytest.raises(ValueError, match="rate above zero"):
        max_min(10, [Claim(0, 1)])


def test_initial_quotas_follow_rate_times_layers_times_heads() -> None:
    profiles = [
        profile("small", rate=1.0, layers=4, kv_heads=4, floor_pages=0),
        profile("often", rate=3.0, layers=4, kv_heads=4, floor_pages=0),
        profile("wide", rate=1.0, layers=8, kv_heads=4, floor_pages=0),
        # Twice the head size in half the tokens: as many bytes per page, twice the pages per token.
        profile("heads", rate=1.0, layers=4, kv_heads=4, block_tokens=8, floor_pages=0),
    ]
    assert initial_quotas(profiles, 800) == {"small": 100, "often": 300, "wide": 200, "heads": 200}


def test_a_model_with_longer_requests_has_a_larger_quota() -> None:
    profiles = [profile("short", floor_pages=0, tokens=100), profile("long", floor_pages=0, tokens=300)]
    assert initial_quotas(profiles, 800) == {"short": 200, "long": 600}


def unit(*quotas: int, pages: int = 1000, **changes: object) -> tuple[UnitLedger, QuotaAdapter]:
    profiles = [
        profile(f"m{i}", quota_pages=q, **{"floor_pages": 40, "max_num_seqs": 64, **changes})
        for i, q in enumerate(quotas)
    ]
    ledger = UnitLedger(profiles, [PoolProfile("pool", pages)])
    return ledger, QuotaAdapter(ledger.pools["pool"], QuotaConfig())


def apply(ledger: UnitLedger, adapter: QuotaAdapter, used: dict[str, int], rounds: int = 1) -> int:
    made = 0
    for _ in range(rounds):
        changes = adapter.adapt()
        made += len(changes)
        quotas = {m.name: m.quota for m in ledger.models} | {c.model: c.pages for c in changes}
        assert sum(quotas.values()) <= ledger.pools["pool"].profile.pages
        for model in ledger.models:
            assert model.retired or quotas[model.name] >= model.profile.floor_pages
            if quotas[model.name] < model.quota:
                assert quotas[model.name] >= used.get(model.name, 0)
                assert model.retired or model.quota - quotas[model.name] <= 100
            ledger.pages(model.name, used.get(model.name, 0), 0, quotas[model.name])
    return made


def queue(ledger: UnitLedger, model: str, count: int, prompt: int = 100) -> None:
    for index in range(count):
        ledger.arrived(QueuedRequest(f"{model}-{index}", model, prompt, 50, 0.0), 0.0)


def test_quota_goes_in_steps_to_who_uses_it() -> None:
    ledger, adapter = unit(500, 500)
    queue(ledger, "m0", 60)
    apply(ledger, adapter, {"m0": 500})
    assert [m.quota for m in ledger.models] == [600, 400]
    apply(ledger, adapter, {"m0": 600}, rounds=10)
    assert [m.quota for m in ledger.models] == [960, 40]


def test_what_is_held_is_not_taken_but_growth_waits() -> None:
    ledger, adapter = unit(900, 100)
    ledger.pages("m0", 900, 0, 900)
    queue(ledger, "m0", 60)
    queue(ledger, "m1", 60)
    apply(ledger, adapter, {"m0": 900, "m1": 100}, rounds=5)
    assert [m.quota for m in ledger.models] == [900, 100]
    assert adapter.targets == [500, 500], "m0 admits no more beyond its target"
    apply(ledger, adapter, {"m0": 700, "m1": 100}, rounds=1)
    apply(ledger, adapter, {"m0": 700, "m1": 100}, rounds=5)
    assert [m.quota for m in ledger.models] == [700, 300]


def test_small_differences_move_nothing() -> None:
    ledger, adapter = unit(510, 490)
    assert apply(ledger, adapter, {"m0": 100, "m1": 100}, rounds=5) == 0


def test_a_request_that_waits_for_a_little_gets_it_at_once() -> None:
    ledger, adapter = unit(500, 500)
    ledger.pages("m0", 480, 0, 500)
    queue(ledger, "m0", 1)
    assert apply(ledger, adapter, {"m0": 480}) == 2
    assert ledger.models[0].quota >= 480 + 7 * 4


def test_without_load_quotas_return_to_the_division_by_weight() -> None:
    ledger, adapter = unit(900, 100)
    apply(ledger, adapter, {}, rounds=20)
    assert abs(ledger.models[0].quota - 500) <= 20


def test_usage_is_normalised_by_weight() -> None:
    profiles = [profile("a", rate=3.0), profile("b", rate=1.0)]
    ledger = UnitLedger(profiles, [PoolProfile("pool", 1000)])
    assert normalised_usage(ledger.pools["pool"], profiles, [750, 125]) == [1.0, 0.5]
    assert demand_weight(profiles[0]) == 3 * demand_weight(profiles[1])


def test_a_retired_model_lends_its_pages_and_gets_its_floor_back_first() -> None:
    ledger, adapter = unit(500, 500)
    retired, other = ledger.models
    retired.retired = True
    apply(ledger, adapter, {"m0": 0, "m1": 400}, rounds=20)
    assert (retired.quota, other.quota) == (0, 1000)
    retired.retired = False
    apply(ledger, adapter, {"m0": 0, "m1": 400}, rounds=1)
    assert retired.quota >= retired.profile.floor_pages


def test_what_a_retired_model_still_holds_stays_its_own() -> None:
    ledger, adapter = unit(500, 500)
    ledger.models[0].retired = True
    ledger.pages("m0", 120, 0, 500)
    apply(ledger, adapter, {"m0": 120, "m1": 0}, rounds=5)
    assert [m.quota for m in ledger.models] == [120, 880]


def test_without_any_model_in_service_quotas_stay_at_nothing() -> None:
    ledger, adapter = unit(500, 500)
    for each in ledger.models:
        each.retired = True
    apply(ledger, adapter, {"m0": 0, "m1": 0}, rounds=3)
    assert [m.quota for m in ledger.models] == [0, 0]


def test_more_models_than_the_pool_has_floors_for_share_it() -> None:
    """As when the memory's limit was raised since it was planned: quotas go on following the load."""
    profiles = [profile(f"m{n}", quota_pages=100, floor_pages=400) for n in range(4)]
    book = UnitLedger(profiles, [PoolProfile("pool", 1000)])
    (pool,) = book.pools.values()
    adapter = QuotaAdapter(pool, QuotaConfig())
    for model, quota in zip(pool.models, (500, 500, 0, 0), strict=True):
        book.pages(model.name, 0, 0, quota)
    for _ in range(20):
        for change in adapter.adapt():
            book.pages(change.model, 0, 0, change.pages)
        assert sum(model.quota for model in pool.models) <= 1000
    assert min(model.quota for model in pool.models) >= 240, "a quarter each, but for what is not worth a move"


# ---------------------------------------------------------------- fixed quotas


@given(st.data())
def test_whoever_is_in_service_gets_its_floor_of_what_is_lent(data: st.DataObject) -> None:
    """As of models that sleep: all floors together are more than the pool, and those of three have room."""
    profiles = [profile(f"m{n}", quota_pages=40, floor_pages=300) for n in range(24)]
    book = UnitLedger(profiles, [PoolProfile("pool", 1000)])
    (pool,) = book.pools.values()
    for _ in range(3):
        serving = data.draw(st.sets(st.sampled_from(sorted(book.by_name)), min_size=1, max_size=3))
        for model in pool.models:
            model.retired = model.name not in serving
            book.pages(model.name, 0, 0, model.quota)
        for _ in range(2):
            for change in lend(pool, fixed_targets(pool)):
                book.pages(change.model, 0, 0, change.pages)
        assert sum(model.quota for model in pool.models) <= 1000
        for name in serving:
            assert book.by_name[name].quota >= 300


@settings(deadline=None)
@given(
    data=st.data(),
    own=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    spare=st.integers(0, 100),
)
def test_fixed_quotas_are_lent_and_come_back(data: st.DataObject, own: list[int], spare: int) -> None:
    pages = sum(own) + spare
    profiles = [profile(f"m{i}", quota_pages=quota, floor_pages=1) for i, quota in enumerate(own)]
    book = UnitLedger(profiles, [PoolProfile("pool", pages)])
    (pool,) = book.pools.values()

    def settle() -> None:
        for change in lend(pool, fixed_targets(pool)):
            model = book.by_name[change.model]
            assert change.pages >= min(model.quota, model.used), "nobody is preempted for it"
            book.pages(model.name, model.used, 0, change.pages)
        assert sum(model.quota for model in pool.models) <= pages

    for _ in range(data.draw(st.integers(1, 4))):
        for model in pool.models:
            model.retired = data.draw(st.booleans())
            book.pages(model.name, data.draw(st.integers(0, model.quota)), 0, model.quota)
        settle()
        settle()
    for model in pool.models:
        model.retired = data.draw(st.booleans())
        book.pages(model.name, 0, 0, model.quota)
    settle()
    settle()
    lent = sum(model.profile.quota_pages for model in pool.models if model.retired)
    serving = [model for model in pool.models if not model.retired]
    assert all(model.quota == 0 for model in pool.models if model.retired)
    if serving:
        assert sum(model.quota - model.profile.quota_pages for model in serving) >= lent - len(serving)
    assert all(model.quota >= model.profile.quota_pages for model in serving)
    assert lend(pool, fixed_targets(pool)) == []
