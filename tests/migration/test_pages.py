"""Pages of shared memory, as the migrator reads and writes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from muxserve.memory.client import MemoryClient
from muxserve.migration.pages import HostPages, of_all_ranks, pages_of
from tests.memory.conftest import connect, manager, small, start  # noqa: F401 (fixtures)

Connect = Callable[[str], MemoryClient]


def test_blocks_are_copied_gathered_and_scattered(connect: Connect) -> None:  # noqa: F811
    client = connect("one")
    (pages,) = of_all_ranks(client, "a", 1, HostPages)
    assert isinstance(pages, HostPages)
    blocks = client.step("a", reserve=6).reserved.tolist()
    noise = np.random.default_rng(1).integers(0, 256, (18, pages.pool.shape[1]), dtype=np.uint8)
    pages.scatter(noise.reshape(-1), blocks[:3])
    assert np.array_equal(pages.pool[pages.table[blocks[:3]].reshape(-1)], noise)
    assert np.array_equal(pages.gather(blocks[:3]), noise.reshape(-1))
    pages.copy_to(blocks[:3], pages, blocks[3:])
    assert np.array_equal(pages.gather(blocks[3:]), noise.reshape(-1))
    # What came over the network is read-only.
    frame = np.frombuffer(noise.tobytes(), dtype=np.uint8)
    pages.scatter(frame, blocks[3:][::-1])
    assert np.array_equal(pages.gather(blocks[3:][::-1]), noise.reshape(-1))


def test_parts_of_a_state_go_in_the_order_of_its_pages(connect: Connect) -> None:  # noqa: F811
    """Whatever the order of its blocks is here and there."""
    client = connect("one")
    (pages,) = of_all_ranks(client, "a", 1, HostPages)
    assert isinstance(pages, HostPages)
    blocks = client.step("a", reserve=6).reserved.tolist()
    ours, theirs = [blocks[i] for i in (4, 0, 2)], [blocks[i] for i in (1, 5, 3)]
    per_block = pages.table[ours].size // 3
    noise = np.random.default_rng(2).integers(0, 256, (3 * per_block, pages.pool.shape[1]), dtype=np.uint8)
    pages.pool[np.sort(pages.table[ours].reshape(-1))] = noise
    pages.copy_to(ours, pages, theirs, (0, 2))
    data = pages.gather(ours, (2, 3))
    assert np.array_equal(data, noise[2 * per_block :].reshape(-1))
    pages.scatter(data, theirs, (2, 3))
    assert np.array_equal(pages.pool[np.sort(pages.table[theirs].reshape(-1))], noise)


@pytest.mark.parametrize("wrong", [[-1], [0], [20], [1, 1 << 40]])
def test_blocks_that_the_table_does_not_have(connect: Connect, wrong: list[int]) -> None:  # noqa: F811
    pages = HostPages(connect("one").map("a"))
    with pytest.raises(IndexError, match="blocks are 1 to 19"):
        pages_of(pages.table, wrong)
    with pytest.raises(IndexError, match="blocks are 1 to 19"):
        pages.gather(wrong)


def test_a_block_that_nobody_has_is_not_written(connect: Connect) -> None:  # noqa: F811
    """Its row is of null pages, which are never written."""
    pages = HostPages(connect("one").map("a"))
    data = np.ones(6 * pages.pool.shape[1], dtype=np.uint8)
    assert not pages.table[7].any()
    with pytest.raises(IndexError, match="page 0 is not one of"):
        pages.scatter(data, [7])
    with pytest.raises(ValueError, match="fill"):
        pages.scatter(data[1:], [7])
