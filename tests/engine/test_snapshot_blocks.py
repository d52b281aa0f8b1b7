"""Snapshots of states on the memory manager itself: found as a whole or not at all, evicted as other blocks are, and
held by nobody between two steps. No engine."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.kv_cache_utils import BlockHash

from muxserve.engine.block_pool import PooledBlockPool
from muxserve.memory import server
from muxserve.memory.client import MemoryClient
from muxserve.memory.view import ModelView
from muxserve.spec import PoolSpec
from tests.support.patience import PATIENCE
from tests.support.unit_specs import model_spec, unit_spec_of

BLOCKS, STATE_BLOCKS, QUOTA = 41, 3, 30


class Unit:
    """One model on blocks of one page, and the pool of one engine."""

    def __init__(self, client: MemoryClient) -> None:
        self.client = client
        self.view: ModelView = client.map("m")
        binding: Any = SimpleNamespace(client=client, view=self.view)
        self.pool = PooledBlockPool(BLOCKS, True, 16, binding)

    def look_up(self, *prompts: list[BlockHash]) -> list[tuple[int, int]]:
        return self.pool.begin_behind_snapshots(prompts, STATE_BLOCKS)

    def compute(self, prompt: list[BlockHash], until: int) -> bool:
        """Fill the first `until` blocks of a prompt and keep a snapshot behind them, with the block's hash in each;
        whether there were pages for it."""
        self.pool.begin_step(until)
        if self.pool.get_num_free_blocks() < until:
            self.pool.end_step()
            return False
        blocks = self.pool.get_new_blocks(until)
        request: Any = SimpleNamespace(block_hashes=prompt)
        self.pool.cache_full_blocks(request, blocks, 0, until, 16, 0)
        kept = self.pool.keep_snapshot(prompt[until - 1], STATE_BLOCKS)
        for block in kept:
            self.content(block.block_id)[:32] = np.frombuffer(prompt[until - 1], dtype=np.uint8)
        self.pool.publish(self.pool.take_filled())
        self.pool.free_blocks(reversed(blocks))
        self.pool.end_step()
        return bool(kept)

    def content(self, block: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        found: np.ndarray[Any, np.dtype[np.uint8]] = self.view.pool[self.view.page_table[block].reshape(-1)[0]]
        return found

    def owned(self) -> int:
        self.client.stats()  # behind what was posted
        return self.view.counters.used_pages


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Unit]:
    model = model_spec("m", pool="p", layers=1, kv_heads=1, block_tokens=16, num_blocks=BLOCKS, quota_pages=QUOTA)
    spec = unit_spec_of(tmp_path, [model], PoolSpec("p", 64, BLOCKS))
    process = server.start(spec)
    client = MemoryClient(spec.memory_socket, "m/prefill", timeout_s=PATIENCE)
    try:
        yield Unit(client)
    finally:
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        server.remove_segments(spec)


def prompt(*parts: int) -> list[BlockHash]:
    """The block hashes of a prompt: each stands for all of the prompt up to it, as vLLM's do."""
    return [BlockHash(bytes(parts[: end + 1]).ljust(32, b"\0")) for end in range(len(parts))]


def test_a_prompt_begins_behind_the_longest_prefix_that_has_a_snapshot(unit: Unit) -> None:
    long = prompt(1, 2, 3, 4, 5)
    assert unit.look_up(long) == [(0, 0)]
    unit.pool.end_step()
    assert unit.compute(long, 2)
    assert unit.compute(long, 4)
    assert unit.look_up(long, prompt(1, 2, 3), prompt(1, 7)) == [(4, 4), (2, 3), (0, 1)]
    assert [unit.pool.behind_snapshot(each[:4]) for each in (long, prompt(1, 2, 3), prompt(1, 7))] == [4, 2, 0]
    # The four blocks of the first, and two snapshots.
    assert unit.owned() == 4 + 2 * STATE_BLOCKS
    unit.pool.end_step()
    assert unit.owned() == 0


def test_what_is_cached_behind_the_last_snapshot_takes_no_pages_from_the_step(unit: Unit) -> None:
    assert unit.compute(prompt(*range(1, 3)), 2)
    unit.pool.begin_step(20)
    blocks = unit.pool.get_new_blocks(20)
    request: Any = SimpleNamespace(block_hashes=prompt(*range(1, 21)))
    unit.pool.cache_full_blocks(request, blocks, 0, 20, 16, 0)
    unit.pool.publish(unit.pool.take_filled())
    unit.pool.free_blocks(blocks)
    unit.pool.end_step()
    assert unit.look_up(prompt(*range(1, 22))) == [(2, 20)]
    unit.pool.begin_step(QUOTA)
    assert unit.pool.get_num_free_blocks() == QUOTA - 2 - STATE_BLOCKS
    unit.pool.end_step()


@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_is_found_as_a_whole_or_not_at_all(unit: Unit, seed: int) -> None:
    """Prompts that begin alike, in a pool that has room for a few of them only."""
    chance, found = random.Random(seed), 0
    for _ in range(150):
        prompts = [prompt(*(chance.randint(1, 2) for _ in range(chance.randint(1, 6)))) for _ in range(2)]
        for each, (begins, cached) in zip(prompts, unit.look_up(*prompts), strict=True):
            assert begins <= cached <= len(each)
            assert unit.pool.behind_snapshot(each[:cached]) >= begins
            if begins:
                found += 1
                blocks = unit.pool.snapshot(each[begins - 1])
                assert len({block.block_id for block in blocks}) == STATE_BLOCKS
                assert all(unit.content(b.block_id)[:32].tobytes() == each[begins - 1] for b in blocks)
        unit.pool.end_step()
        assert unit.owned() == 0
        unit.compute(prompts[0], chance.randint(1, len(prompts[0])))
        assert unit.owned() == 0
    assert found > 10
