"""Requests that need more pages than their model may count on: they wait for the others, and are served."""

from __future__ import annotations

import pytest
from hypothesis import Phase as Phases
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.scheduling.admission import missing_pages
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.long_requests import long_request_floors
from muxserve.scheduling.policies import POLICIES, make_policy
from muxserve.scheduling.types import PoolProfile, QueuedRequest
from tests.scheduling.machine import Job, Machine, profile
from tests.support.thoroughness import examples

# One of them is for units of one model.
NAMES = sorted(set(POLICIES) - {"rolling"})
BLOCK, BLOCK_PAGES = 16, 4


def machine(name: str, pages: int, models: int, both: bool = False, floor: int = 0, seats: int = 8) -> Machine:
    """Models that share a pool evenly, with floors that may be far too small for their requests."""
    profiles = [
        profile(f"m{n}", quota_pages=pages // models, floor_pages=floor, both=both, max_num_seqs=seats)
        for n in range(models)
    ]
    made = Machine(make_policy(name), profiles, pages)
    made.floors_hold = False
    return made


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(40), deadline=None, phases=[Phases.explicit, Phases.reuse, Phases.generate])
@given(data=st.data())
def test_whatever_fits_the_pool_alone_is_served(name: str, data: st.DataObject) -> None:
    """However many models are declared, whatever their floors are, and whatever else comes."""
    blocks = data.draw(st.integers(4, 40))
    pages, models = blocks * BLOCK_PAGES + data.draw(st.integers(0, 3)), data.draw(st.integers(2, 12))
    floor = data.draw(st.integers(0, pages // models))
    world = machine(name, pages, models, data.draw(st.booleans()), floor, data.draw(st.integers(1, 6)))
    # With its last token a request is in all blocks that there are, or in fewer.
    most = blocks * BLOCK - 1
    drawn = st.tuples(st.integers(0, models - 1), st.integers(1, most), st.integers(1, most), st.floats(0, 0.5))
    for number, (model, prompt, output, arrival) in enumerate(data.draw(st.lists(drawn, min_size=1, max_size=12))):
        prompt = min(prompt, most - 1)
        world.submit(Job(f"r{number}", f"m{model}", prompt, min(output, most - prompt), arrival))
    world.run(most_turns=400_000)
    assert not world.unfinished()
    assert not any(map(world.used, world.profiles))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("both", [False, True])
def test_neither_short_nor_long_requests_starve_the_others(name: str, both: bool) -> None:
    """Streams of both: short ones that would hold all pages at any time, and such as need nearly all of them."""
    world = machine(name, 160, 2, both, floor=16)
    for number in range(300):
        world.submit(Job(f"short{number}", "m0", 40, 20, 0.01 * number))
    for number in range(4):
        world.submit(Job(f"long{number}", "m1", 550, 20, 0.2 + 0.6 * number))
    world.run()
    waited = {name: (job.first_token or 99.0) - job.arrival for name, job in world.jobs.items()}
    order = [name for name, _ in sorted(world.jobs.items(), key=lambda item: item[1].first_token or 99.0)]
    assert not world.unfinished()
    # Those that came after a long request wait for it, and not those that came before.
    for number in range(4):
        long = world.jobs[f"long{number}"]
        later = [j for j in world.jobs.values() if j.model == "m0" and j.arrival > long.arrival + 0.5]
        assert order.index(long.request_id) < order.index(max(later, key=lambda j: j.arrival).request_id)
    assert max(waited.values()) < 99.0


@pytest.mark.parametrize("name", NAMES)
def test_nobodys_length_depends_on_who_is_declared(name: str) -> None:
    for models in (1, 2, 40):
        world = machine(name, 160, models)
        assert world.policy.capacity(world.ledger.by_name["m0"]) == 160
        world.submit(Job("long", "m0", 600, 20, 0.0))
        world.run()
        assert world.jobs["long"].done is not None
        assert world.preemptions <= 1


def book(*used: int, pages: int = 100) -> UnitLedger:
    """Models with a tenth of the pool as their floor, which use so much."""
    ledger = UnitLedger(
        [profile(f"m{n}", quota_pages=pages // len(used), floor_pages=10) for n in range(len(used))],
        [PoolProfile("pool", pages)],
    )
    for model, each in zip(ledger.models, used, strict=True):
        ledger.pages(model.name, each, 0, model.quota)
    ledger.pool_pages("pool", pages - sum(used), 0)
    return ledger


def ask(ledger: UnitLedger, model: str, blocks: int, arrival: float) -> None:
    ledger.arrived(QueuedRequest(f"{model}@{arrival}", model, blocks * BLOCK - 1, 1, arrival), arrival)


def test_nothing_changes_while_requests_fit_their_models_parts() -> None:
    ledger = book(0, 0)
    assert long_request_floors(100, ledger.models, [50, 50]) is None
    ask(ledger, "m0", 12, 0.0)  # 48 pages
    assert long_request_floors(100, ledger.models, [50, 50]) is None
    assert missing_pages(ledger.models[0]) == 0


def test_the_oldest_requests_get_their_pages_first() -> None:
    ledger = book(0, 0, 0)
    ask(ledger, "m1", 20, 1.0)
    assert long_request_floors(100, ledger.models, [33, 33, 34]) == [10, 80, 10]
    assert missing_pages(ledger.models[1]) == 80 - 32
    # An older one has what it needs, and the long one all of the rest.
    ask(ledger, "m0", 6, 0.5)
    assert long_request_floors(100, ledger.models, [33, 33, 34]) == [24, 76, 0]
    # A younger one waits for it.
    ask(ledger, "m2", 6, 2.0)
    assert long_request_floors(100, ledger.models, [33, 33, 34]) == [24, 76, 0]


def test_what_is_longer_than_the_pool_takes_no_more_than_all() -> None:
    ledger = book(0, 0)
    ask(ledger, "m0", 40, 0.0)
    assert long_request_floors(100, ledger.models, [50, 50]) == [100, 0]
