"""Copying pages from Python: what the C++ tests do not see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muxserve.memory._native import copy_pages, gather_pages, scatter_pages
from tests.memory.support import ids


def pool(pages: int = 6, page_bytes: int = 8, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (pages, page_bytes), dtype=np.uint8)


def test_copy_gather_and_scatter() -> None:
    a, b, c = pool(), pool(seed=2), pool(seed=2)
    buffer = np.empty(24, dtype=np.uint8)
    copy_pages(a, ids(1, 2, 5), b, ids(4, 5, 1))
    gather_pages(a, ids(1, 2, 5), buffer)
    scatter_pages(buffer, c, ids(4, 5, 1))
    assert np.array_equal(b[[4, 5, 1]], a[[1, 2, 5]])
    assert np.array_equal(b, c)


def test_memory_that_is_only_read_may_be_read_only() -> None:
    a, b = pool(), pool(seed=2)
    a.flags.writeable = False
    copy_pages(a, ids(1), b, ids(2))
    scatter_pages(np.frombuffer(bytes(8), dtype=np.uint8), b, ids(3))
    assert np.array_equal(b[2], a[1])
    assert not b[3].any()
    for write in (
        lambda: copy_pages(b, ids(1), a, ids(2)),
        lambda: scatter_pages(np.zeros(8, dtype=np.uint8), a, ids(2)),
        lambda: gather_pages(b, ids(1), np.frombuffer(bytes(8), dtype=np.uint8)),
    ):
        with pytest.raises(TypeError):
            write()


@pytest.mark.parametrize("pages", [ids(6), ids(-1), ids(0)])
def test_pages_that_are_not_there(pages: Any) -> None:
    with pytest.raises(IndexError, match="is not one of 1 to 6"):
        copy_pages(pool(), ids(1), pool(), pages)


def test_other_types_and_sizes_are_refused() -> None:
    with pytest.raises(TypeError):
        copy_pages(pool(), np.array([1]), pool(), np.array([2]))  # int64 would be converted on the way
    with pytest.raises(TypeError):
        copy_pages(pool()[:, ::2], ids(1), pool(page_bytes=4), ids(1))  # not contiguous
    with pytest.raises(ValueError, match="do not fill"):
        gather_pages(pool(), ids(1, 2), np.empty(8, dtype=np.uint8))
    with pytest.raises(ValueError, match="differ in size"):
        copy_pages(pool(), ids(1), pool(page_bytes=4), ids(1))
