"""Pools that give memory back and take it again: a real manager, real clients, real kills."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muxserve.memory import server
from muxserve.memory.client import MemoryClient
from muxserve.memory.errors import MemoryManagerError
from muxserve.spec import UnitSpec
from tests.memory.support import assert_balanced, model, unit_spec
from tests.support.patience import eventually

# Chunks of four pages.
PAGE_BYTES, CHUNK_BYTES, PAGES = 16384, 65536, 64


@pytest.fixture
def of(tmp_path: Path) -> UnitSpec:
    made = unit_spec(tmp_path, models=[model("a", 2, 2, 16, 40)])
    (pool,) = made.pools
    pool = msgspec.structs.replace(pool, page_bytes=PAGE_BYTES, num_pages=PAGES, chunk_bytes=CHUNK_BYTES)
    return msgspec.structs.replace(made, pools=[pool])


@pytest.fixture
def manager(of: UnitSpec) -> Iterator[list[Any]]:
    started = [server.start(of)]
    yield started
    for process in started:
        process.kill()
        process.wait()
    server.remove_segments(of)


def taken(of: UnitSpec) -> int:
    """Bytes of shared memory that the pool has."""
    return os.stat(f"/dev/shm/{server.prefix(of)}.pool.0").st_blocks * 512


def test_memory_of_pages_that_nobody_uses_is_given_back(of: UnitSpec, manager: list[Any]) -> None:
    with MemoryClient(of.memory_socket, "engine") as engine, MemoryClient(of.memory_socket, "unit") as unit:
        view = engine.map("a")
        blocks = engine.step("a", reserve=10).reserved
        with engine.writing():
            view.pool[view.page_table[blocks].reshape(-1)] = 7
        assert taken(of) >= 40 * PAGE_BYTES
        unit.set_room("p", 8)
        # Blocks in use stay as they are, wherever their pages lie.
        assert view.counters.room_pages == 8
        assert taken(of) >= 40 * PAGE_BYTES
        assert (view.pool[view.page_table[blocks].reshape(-1)] == 7).all()
        assert len(engine.step("a", reserve=1, partial=True).reserved) == 0
        engine.step("a", release=blocks)
        assert view.counters.backed_pages == 8
        assert taken(of) <= 8 * PAGE_BYTES
        assert unit.stats()["pools"][0]["backed_pages"] == 8
        unit.set_room("p", PAGES)
        again = engine.step("a", reserve=10).reserved
        with engine.writing():
            view.pool[view.page_table[again].reshape(-1)] = 9
        assert (view.pool[view.page_table[again].reshape(-1)] == 9).all()


def test_an_engine_that_dies_gives_up_its_chunks(of: UnitSpec, manager: list[Any]) -> None:
    with MemoryClient(of.memory_socket, "unit") as unit:
        engine = MemoryClient(of.memory_socket, "engine")
        view = engine.map("a")
        engine.step("a", reserve=10)
        view.pool[:] = 1
        unit.set_room("p", 4)
        assert view.counters.backed_pages > 4
        engine.close()
        eventually(lambda: view.counters.backed_pages == 4, "its chunks are given back")
        assert taken(of) <= 4 * PAGE_BYTES
        assert_sums(unit)


def test_a_manager_that_dies_while_chunks_are_vacated_leaves_nothing_behind(of: UnitSpec, manager: list[Any]) -> None:
    with MemoryClient(of.memory_socket, "engine") as engine:
        view = engine.map("a")
        engine.step("a", reserve=10)
        view.pool[:] = 1
        engine.set_room("p", 4)
        manager[0].kill()
        manager[0].wait()
    manager.append(server.start(of))
    with MemoryClient(of.memory_socket, "engine") as engine:
        # It knows of no room that was set before.
        assert engine.map("a").counters.room_pages == PAGES
        engine.set_room("p", 4)
        assert view.current
        assert view.counters.backed_pages == 4
        assert taken(of) <= 4 * PAGE_BYTES
        assert_sums(engine)


def test_a_manager_begins_with_the_pages_that_it_is_to_begin_with(of: UnitSpec, manager: list[Any]) -> None:
    with MemoryClient(of.memory_socket, "engine") as engine:
        engine.map("a").pool[:] = 1
    manager[0].kill()
    manager[0].wait()
    few = msgspec.structs.replace(of, pools=[msgspec.structs.replace(of.pools[0], start_pages=8)])
    manager.append(server.start(few))
    with MemoryClient(of.memory_socket, "engine") as engine:
        assert engine.map("a").counters.backed_pages == 8
        assert taken(of) <= 8 * PAGE_BYTES


def test_a_room_that_the_pool_has_not_is_refused(of: UnitSpec, manager: list[Any]) -> None:
    with MemoryClient(of.memory_socket, "unit") as unit:
        for pages in (0, -1, PAGES + 1):
            with pytest.raises(MemoryManagerError, match=r"is not between 1 and its 64"):
                unit.set_room("p", pages)
        with pytest.raises(KeyError):
            unit.set_room("q", 4)
        assert_balanced(unit)


def assert_sums(client: MemoryClient) -> None:
    """Pages that may be in use are free, in use or cached."""
    (pool,) = client.stats()["pools"]
    used = sum(pool[kind] for kind in ("free_pages", "owned_pages", "handed_pages", "cached_pages"))
    assert used + 1 == pool["room_pages"] == pool["backed_pages"]
