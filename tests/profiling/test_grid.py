"""Which cells are measured, and how steps that waited for a core are told from others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from muxserve.profiling.contention import CoreWaits, Sample, disturbance, step_seconds
from muxserve.profiling.grid import DECODE_STEPS, Grid, fits, grid_for, parse_counts
from muxserve.spec import ModelSpec
from tests.support.unit_specs import model_spec


def model(**changes: Any) -> ModelSpec:
    values = {"num_blocks": 1000, "quota_pages": 0, "max_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    return model_spec("m", **{**values, **changes})


def test_the_default_grid_runs_within_every_limit_of_the_model() -> None:
    found = grid_for(Grid(), model(max_num_seqs=16, max_num_batched_tokens=512, max_len=600), pages=600)
    assert found.prefill
    assert all(s <= 16 and s * t <= 512 and t + 2 <= 600 for s, t in found.prefill)
    assert [context for context, _ in found.decode] == [64, 256]
    for context, batches in found.decode:
        assert list(batches) == sorted(batches, reverse=True)
        # 600 pages are 150 blocks of 64 tokens.
        assert all(b <= 16 and b * -(-(context + DECODE_STEPS) // 64) <= 135 for b in batches)
    assert found.chunked is not None
    assert found.chunked.tokens * found.chunked.chunks <= 598


def test_a_model_with_room_gets_everything() -> None:
    grid = Grid()
    found = grid_for(grid, model(num_blocks=1 << 20, max_len=8192), pages=1 << 20)
    assert {batch for _, batches in found.decode for batch in batches} == set(grid.batches)
    assert {tokens for _, tokens in found.prefill} == set(grid.tokens)
    decode = len(grid.batches) * len(grid.contexts)
    assert found.cells == len(found.prefill) + found.chunked.chunks - 1 + decode  # type: ignore[union-attr]


def test_a_tenth_of_the_pages_is_left_free() -> None:
    assert fits(model(), 4 * 10, 1, 9 * 64)
    assert not fits(model(), 4 * 10, 1, 9 * 64 + 1)
    assert not fits(model(num_blocks=9), 1 << 20, 1, 9 * 64)


@pytest.mark.parametrize("text", ["", "1,,2", "a", "0", "4,-1", "1.5"])
def test_lists_that_are_none_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"--tokens must be whole numbers .* such as 1,4,16"):
        parse_counts(text, "--tokens")


def test_lists_keep_their_order_and_lose_what_is_there_twice() -> None:
    assert parse_counts("8, 2,8,1", "--batches") == (8, 2, 1)


def test_undisturbed_steps_count_alone_where_there_are_enough() -> None:
    quiet = [Sample(1.0, 0.0), Sample(1.1, 0.01), Sample(0.9, 0.0)]
    assert step_seconds([*quiet, Sample(9.0, 1.0), Sample(7.0, 5.9)]) == 1.0


def test_waiting_is_taken_off_where_all_waited() -> None:
    assert step_seconds([Sample(2.0, 1.0), Sample(5.0, 3.9), Sample(1.3, 0.2)]) == pytest.approx(1.1)
    # The kernel may have counted more than the step.
    assert step_seconds([Sample(1.0, 3.0)]) == pytest.approx(0.05)


def test_disturbance_is_the_part_of_all_time() -> None:
    assert disturbance([Sample(3.0, 0.0), Sample(1.0, 1.0)]) == pytest.approx(0.25)
    assert disturbance([]) == 0.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel keeps no scheduling statistics")
def test_a_process_that_waits_for_a_core_is_seen() -> None:
    core = min(os.sched_getaffinity(0))

    def spin() -> int:
        """A process that keeps our core busy."""
        pid = os.fork()
        if not pid:
            os.sched_setaffinity(0, {core})
            while True:
                pass
        return pid

    pids = [spin(), spin()]
    try:
        waiting = CoreWaits(pids[0])
        total = 0.0
        for _ in range(200):
            total += waiting.since()
            if total > 0.01:
                break
            os.sched_yield()
            os.waitpid(pids[0], os.WNOHANG)
            _pause()
        assert total > 0.01
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    assert waiting.since() == 0.0  # it is gone


def _pause() -> None:
    import select

    select.select([], [], [], 0.02)
