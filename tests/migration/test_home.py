"""This unit's memory manager, as the migrator holds blocks of it."""

from __future__ import annotations

import logging
import subprocess

import numpy as np
import pytest

from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.memory.view import ModelView
from muxserve.migration.local_pool import LocalPool
from muxserve.migration.pages import HostPages, Pages
from muxserve.spec import UnitSpec
from tests.memory.conftest import Start, manager, small, start  # noqa: F401 (fixtures)


def test_it_waits_for_a_manager(start: Start, small: UnitSpec) -> None:  # noqa: F811
    home = LocalPool(small, HostPages)
    assert not home.connect()
    assert not home.look()
    with pytest.raises(MemoryManagerGone):
        home.reserve("a", 1)
    with pytest.raises(MemoryManagerGone):
        home.pages("a")
    start(small)
    assert home.connect()
    assert home.look()
    assert home.life
    home.close()


def test_blocks_and_pages(manager: subprocess.Popen[bytes], small: UnitSpec) -> None:  # noqa: F811
    home = LocalPool(small, HostPages)
    assert home.connect()
    blocks = home.reserve("a", 3)
    assert len(blocks) == 3
    assert home.reserve("a", 1000) == []
    (pages,) = home.pages("a")
    data = np.arange(6 * 64, dtype=np.uint8)
    with home.writing("a", home.life) as (writable,):
        writable.scatter(data, blocks[:1])
    assert np.array_equal(pages.gather(blocks[:1]), data)
    with pytest.raises(MemoryManagerGone), home.writing("a", home.life + 1):
        pass
    home.hand_off("a", "key", blocks[:2], blocks[2:], 10.0)
    with pytest.raises(MemoryManagerError, match="NOT_OWNER"):
        home.release("a", blocks[:1])
    home.drop("a", "key")
    home.drop("a", "key")  # whoever was there first
    home.close()


def test_a_manager_that_dies(manager: subprocess.Popen[bytes], start: Start, small: UnitSpec) -> None:  # noqa: F811
    home = LocalPool(small, HostPages)
    assert home.connect()
    life = home.life
    manager.kill()
    manager.wait()
    with pytest.raises(MemoryManagerGone):
        home.reserve("a", 1)
    assert home.life == 0
    assert not home.look()
    start(small)
    assert home.connect()
    assert home.life not in (0, life)
    with pytest.raises(MemoryManagerGone), home.writing("a", life):
        pass
    home.close()


def test_pools_that_cannot_be_used_are_told_once(
    manager: subprocess.Popen[bytes],  # noqa: F811
    small: UnitSpec,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lost(view: ModelView) -> Pages:
        raise RuntimeError("the GPU is lost")

    home = LocalPool(small, lost)
    with caplog.at_level(logging.ERROR):
        assert not home.connect()
        assert not home.connect()
    assert [record.getMessage() for record in caplog.records] == [
        "the memory manager's pools cannot be used, so nothing moves here: the GPU is lost"
    ]
