"""The device's copy of the page table against the memory manager's, over random histories of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.engine.cuda import page_table as page_tables
from muxserve.engine.cuda.page_table import DevicePageTable, missing, new_blocks
from muxserve.memory import _native

LAYERS, HEADS, BLOCKS = 3, 2, 40
CPU = torch.device("cpu")
NO_IDS = np.empty(0, dtype=np.int32)


def manager() -> Any:
    """The memory manager's core in this process, with two models that take pages from one another."""
    models = [
        _native.ModelConfig(name, "main", LAYERS, HEADS, num_blocks=BLOCKS, quota_pages=LAYERS * HEADS * 12)
        for name in ("a", "b")
    ]
    pools = [_native.PoolConfig("main", page_bytes=64, num_pages=LAYERS * HEADS * 24)]
    return _native.Manager(_native.Config("test", 1, "posix", [], "auto", pools, models))


def output(new: list[list[int]], cached: list[list[int] | None]) -> Any:
    """vLLM's SchedulerOutput, as far as it speaks of blocks (one group)."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=(ids,)) for ids in new],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None if ids is None else (ids,) for ids in cached]),
    )


def test_new_blocks_are_those_of_new_requests_and_those_that_others_got() -> None:
    assert new_blocks(output([[4, 5], [9]], [None, [7], []])) == [4, 5, 9, 7]
    assert new_blocks(output([], [None, None])) == []


steps = st.lists(
    st.tuples(st.sampled_from(["start", "grow", "end", "other"]), st.integers(0, 5), st.integers(1, 4)), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_every_block_that_a_step_uses_is_as_the_manager_has_it(history: list[tuple[str, int, int]]) -> None:
    books = manager()
    ours, other = books.connect("engine"), books.connect("another")
    table = books.page_table(0)
    device = DevicePageTable(table, CPU)
    requests: dict[int, list[int]] = {}
    others: list[int] = []

    def step(client: int, model: int, release: list[int], reserve: int) -> list[int]:
        given_back = np.array(release, dtype=np.int32)
        return books.step(client, model, given_back, NO_IDS, [], [], reserve, True)[0].tolist()

    for action, which, count in history:
        new, cached = [], []
        if action == "start" and which not in requests:
            requests[which] = step(ours, 0, [], count)
            new.append(requests[which])
        elif action == "grow" and which in requests:
            got = step(ours, 0, [], count)
            requests[which] += got
            cached.append(got or None)
        elif action == "end" and which in requests:
            step(ours, 0, requests.pop(which), 0)
        elif action == "other":  # another model gives back what it had and takes pages that ours may have had
            others = step(other, 1, others, count)
        before = device.uploaded_rows
        ids = new_blocks(output(new, cached))
        device.update(ids)
        assert device.uploaded_rows - before == len(ids)
        held = [block for blocks in requests.values() for block in blocks]
        assert missing(device, held) == []
        assert torch.equal(device.table[held], torch.from_numpy(np.ascontiguousarray(table[held])))
    assert bool((device.table[0] == -1).all())


def test_more_rows_than_are_staged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "STAGED_ROWS", 4)
    source = np.arange(BLOCKS * LAYERS * HEADS, dtype=np.int32).reshape(BLOCKS, LAYERS, HEADS)
    device = DevicePageTable(source, CPU)
    ids = [9, 3, 27, 14, 5, 6, 7, 30, 31]
    device.update(ids)
    assert torch.equal(device.table[ids], torch.from_numpy(source[ids]))
    assert missing(device, range(1, BLOCKS)) == [i for i in range(1, BLOCKS) if i not in ids]
    assert (device.uploaded_rows, device.uploaded_bytes) == (9, 9 * 4 * (1 + LAYERS * HEADS))


def test_a_restarted_manager_s_table_is_known_only_when_uploaded() -> None:
    source = np.ones((BLOCKS, LAYERS, HEADS), dtype=np.int32)
    device = DevicePageTable(source, CPU)
    device.update([5, 6])
    address = device.table.data_ptr()
    device.rebind(source * 2)
    assert missing(device, [5, 6]) == [5, 6]
    device.update([6])
    assert device.table[6].unique().tolist() == [2]
    assert device.table.data_ptr() == address
    with pytest.raises(ValueError, match="page table"):
        device.rebind(source[:-1])
