"""The migrator's copies of device memory, with pools on the CPU: what is copied where, not how fast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from muxserve.migration.device_pages import DevicePages

BLOCKS, LAYERS, HEADS, PAGE_BYTES = 8, 2, 2, 32


def pages(seed: int) -> DevicePages:
    draw = np.random.default_rng(seed)
    table = draw.permutation(np.arange(1, BLOCKS * LAYERS * HEADS + 1)).astype(np.int32)
    view: Any = SimpleNamespace(page_table=table.reshape(BLOCKS, LAYERS, HEADS), name="m", device_pool=None)
    pool = draw.integers(0, 256, (BLOCKS * LAYERS * HEADS + 1, PAGE_BYTES), dtype=np.uint8)
    return DevicePages(view, torch.from_numpy(pool))


def content(of: DevicePages, blocks: list[int]) -> np.ndarray[Any, Any]:
    return of.pool.numpy()[of.table[blocks].reshape(-1)]


def test_blocks_are_copied_and_no_others() -> None:
    a, b = pages(1), pages(2)
    before = b.pool.clone()
    a.copy_to([3, 4, 1], b, [2, 7, 5])
    assert np.array_equal(content(b, [2, 7, 5]), content(a, [3, 4, 1]))
    untouched = sorted(set(range(b.pool.shape[0])) - set(b.table[[2, 7, 5]].reshape(-1).tolist()))
    assert torch.equal(b.pool[untouched], before[untouched])


def test_what_is_gathered_is_scattered_elsewhere() -> None:
    a, b = pages(1), pages(2)
    data = a.gather([6, 2])
    assert data.size == 2 * LAYERS * HEADS * PAGE_BYTES
    data.flags.writeable = False
    b.scatter(data, [1, 3])
    assert np.array_equal(content(b, [1, 3]), content(a, [6, 2]))


def test_wrong_blocks_pages_and_sizes() -> None:
    a = pages(1)
    with pytest.raises(IndexError):
        a.gather([BLOCKS])
    with pytest.raises(ValueError, match="do not fill"):
        a.scatter(np.zeros(3, dtype=np.uint8), [1])
    a.table[5] = 0  # given back meanwhile
    with pytest.raises(IndexError, match="pages are 1 to"):
        a.copy_to([1], a, [5])


def test_a_pool_that_is_not_on_a_gpu() -> None:
    view: Any = SimpleNamespace(page_table=pages(1).table, name="m", device_pool=None)
    with pytest.raises(ValueError, match="not on a GPU"):
        DevicePages(view)
