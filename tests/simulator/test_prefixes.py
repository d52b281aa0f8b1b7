"""Prefix caching in simulation: the index does what the memory manager's does, and hits make prefill shorter."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from muxserve.memory import _native
from muxserve.scheduling.types import PoolProfile
from muxserve.simulator.pages import ModelPages, SimPool
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimUnit
from muxserve.simulator.unit import SimulatedUnit
from muxserve.workload.trace import Content, TraceRequest
from tests.scheduling.machine import profile
from tests.simulator.support import Analytic, run, unit
from tests.support.thoroughness import examples

SIZE, PAGES = 4, 60
PER_BLOCK = (1, 2)
QUOTAS = (25, 35)
NOTHING: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)


class Live:
    """The memory manager's core, and what an engine does with it (`engine.block_pool`): its requests' blocks, counted
    by how many of them use each."""

    def __init__(self) -> None:
        models = [
            _native.ModelConfig(f"m{i}", "main", layers=1, kv_heads=pages, num_blocks=2 * PAGES, quota_pages=quota)
            for i, (pages, quota) in enumerate(zip(PER_BLOCK, QUOTAS, strict=True))
        ]
        pools = [_native.PoolConfig("main", page_bytes=64, num_pages=PAGES + 1)]
        self.manager = _native.Manager(_native.Config("test", 1, "posix", [], "auto", pools, models))
        self.client = self.manager.connect("engine")
        self.users: list[Counter[int]] = [Counter(), Counter()]
        self.blocks: dict[str, list[int]] = {}

    def step(self, model: int, request: str, lookup: list[bytes], reserve: int) -> tuple[int, bool]:
        """Blocks found for `lookup`, and whether there were `reserve` more."""
        found = self.manager.step(self.client, model, NOTHING, NOTHING, b"", [lookup] if lookup else [], reserve, False)
        new, hits = ([] if ids is None else ids.tolist() for ids in found[:2])
        self.users[model].update([*hits, *new])
        self.blocks.setdefault(request, []).extend([*hits, *new])
        return len(hits), len(new) == reserve

    def publish(self, model: int, request: str, first: int, hashes: list[bytes]) -> None:
        ids = np.array(self.blocks[request][first : first + len(hashes)], dtype=np.int32)
        self.manager.step(self.client, model, NOTHING, ids, b"".join(hashes), [], 0, False)

    def end(self, model: int, request: str) -> None:
        released = []
        for block in reversed(self.blocks.pop(request)):
            self.users[model][block] -= 1
            if not self.users[model][block]:
                released.append(block)
        self.manager.step(self.client, model, np.array(released, dtype=np.int32), NOTHING, b"", [], 0, False)

    def counts(self) -> list[tuple[int, int, int, int]]:
        self.manager.check()
        found = json.loads(self.manager.statistics())["models"]
        return [(m["owned_pages"], m["cached_pages"], m["evicted_blocks"], m["hits"]) for m in found]


def hashes(pages: ModelPages, request: SimRequest, blocks: int) -> list[bytes]:
    assert pages.prefixes is not None
    return [hashlib.sha256(repr(key).encode()).digest() for key in pages.prefixes.keys(request, blocks)[:blocks]]


actions = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "fill", "grow", "end", "end", "quota"]),
        st.integers(0, 1),
        st.integers(0, 7),
        st.integers(1, 60),
    ),
    max_size=80,
)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(actions)
def test_the_index_does_what_the_memory_managers_does(steps: list[tuple[str, int, int, int]]) -> None:
    live, pool = Live(), SimPool(PoolProfile("main", PAGES))
    models = [
        ModelPages(i, f"m{i}", pool, pages, quota, SIZE)
        for i, (pages, quota) in enumerate(zip(PER_BLOCK, QUOTAS, strict=True))
    ]
    running: list[list[SimRequest]] = [[], []]
    for number, (action, index, which, amount) in enumerate(steps):
        pages, mine = models[index], running[index]
        assert pages.prefixes is not None
        chosen = mine[which % len(mine)] if mine else None
        if action == "start":
            content: Content = ((f"system {which % 2}", 6), (f"talk {which}", amount))
            request = SimRequest(str(number), pages.model, 0.0, 6 + amount, 100, content)
            hits = pages.find(request, 0.0, 0)
            found, _ = live.step(index, str(number), hashes(pages, request, (6 + amount - 1) // SIZE), 0)
            assert hits == found
            request.blocks = -(-(6 + amount) // SIZE)
            fits = pages.take(request.blocks - hits, 0.0, 0)
            assert live.step(index, str(number), [], request.blocks - hits)[1] is fits
            if fits:
                mine.append(request)
            else:
                pages.give_up(request, hits)
                live.end(index, str(number))
        elif action == "quota":
            # Never above what the pool can give both.
            pages.quota = min(5 + amount, PAGES - models[1 - index].quota)
            live.manager.set_quotas([(index, pages.quota)])
        elif chosen is not None and action == "fill":
            full = min(amount, chosen.blocks)
            if full > chosen.published:
                new = hashes(pages, chosen, full)[chosen.published :]
                live.publish(index, chosen.request_id, chosen.published, new)
                pages.publish(chosen, full * SIZE)
        elif chosen is not None and action == "grow":
            fits = pages.take(1, 0.0, 0)
            assert live.step(index, chosen.request_id, [], 1)[1] is fits
            chosen.blocks += fits
        elif chosen is not None:
            mine.remove(chosen)
            pages.give_up(chosen, chosen.blocks)
            live.end(index, chosen.request_id)
        assert live.counts() == [
            (m.held, m.prefixes.cached_blocks * m.per_block, m.prefixes.evictions, m.prefixes.hits)
            for m in models
            if m.prefixes is not None
        ]
        assert pool.held == sum(m.held for m in models)


def turns(count: int, gap: float = 5.0) -> list[TraceRequest]:
    """A conversation, each turn of which adds 60 tokens to 100 of the system prompt, answers of 20 included."""
    return [
        TraceRequest(gap * n, "m0", 140 + 60 * n, 20, (("system", 100), ("talk", 40 + 60 * n))) for n in range(count)
    ]


def alone(pages: int = 4000, **changes: Any) -> SimUnit:
    return unit([profile("m0", quota_pages=pages, floor_pages=pages, **changes)], pages)


WORLDS = [alone(), *(replace(alone(both=True, decode_share=1.0), policy=policy) for policy in ("rolling", "free"))]


@pytest.mark.parametrize("simulated", WORLDS, ids=["split", "rolling", "one engine"])
def test_a_turn_finds_what_was_said_before_it(simulated: SimUnit) -> None:
    block = simulated.models[0].profile.kv.block_tokens
    result = run(SimulatedUnit(simulated, Analytic()), turns(3))
    # Nothing is computed for the last token of an answer, and the block that is not full is nobody's.
    assert [r.cached_tokens for r in result.records] == [0, *((140 + 60 * n + 19) // block * block for n in range(2))]
    off = replace(simulated, models=(replace(simulated.models[0], prefix_caching=False),))
    plain = run(SimulatedUnit(off, Analytic()), turns(3))
    assert [r.cached_tokens for r in plain.records] == [0, 0, 0]
    (first, *later), (other, *others) = result.records, plain.records
    assert (first.first_token, first.finish) == (other.first_token, other.finish)
    for one, without in zip(later, others, strict=True):
        assert one.first_token is not None
        assert without.first_token is not None
        assert one.first_token < without.first_token


def test_requests_that_say_nothing_of_themselves_are_served_as_without_a_cache() -> None:
    load = [structs.replace(each, content=()) for each in turns(5, 0.01)]
    off = replace(alone(), models=(replace(alone().models[0], prefix_caching=False),))
    assert run(SimulatedUnit(alone(), Analytic()), load).records == run(SimulatedUnit(off, Analytic()), load).records


def test_shared_blocks_are_counted_once() -> None:
    simulated = alone()
    long = [
        TraceRequest(0.0, "m0", 1600, 200, (("talk", 1600),)),
        TraceRequest(1.0, "m0", 1600, 200, (("talk", 1600),)),
    ]
    both = SimulatedUnit(simulated, Analytic())
    run(both, long)
    single = SimulatedUnit(simulated, Analytic())
    run(single, long[:1])
    # Beside those of the first: what the second has for its answer, and for the last token of its prompt.
    more = -(-200 // simulated.models[0].profile.kv.block_tokens) + 2
    (one,), (two,) = single.machine.pages.models, both.machine.pages.models
    assert one.peak < two.peak <= one.peak + more * two.per_block


def test_what_is_cached_goes_when_pages_are_needed() -> None:
    per_block = alone().models[0].profile.kv.pages_per_block
    size = alone().models[0].profile.kv.block_tokens
    # Room for one conversation, not for what two have left behind.
    small = alone(pages=(400 // size) * per_block)
    load = [
        TraceRequest(0.0, "m0", 200, 20, (("a", 200),)),
        TraceRequest(5.0, "m0", 300, 20, (("b", 300),)),
        TraceRequest(10.0, "m0", 240, 20, (("a", 240),)),
    ]
    tight = SimulatedUnit(small, Analytic())
    result = run(tight, load)
    index = tight.machine.pages.models[0].prefixes
    assert index is not None
    assert index.evictions > 0
    assert all(record.ok for record in result.records)
    ample = run(SimulatedUnit(alone(), Analytic()), load)
    assert result.records[2].cached_tokens < ample.records[2].cached_tokens == (200 + 19) // size * size
