"""What the memory tests share: small deployments, managers that are stopped again, and waiting for a condition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from muxserve.memory.client import MemoryClient
from muxserve.spec import ModelSpec, PoolSpec, UnitSpec
from tests.support.unit_specs import model_spec, unit_spec_of

# Model "a": 2 layers x 3 heads = 6 pages a block; model "b": 1 x 2. 100 pages and the null page.
PAGES = 101
PAGE_BYTES = 64


def model(name: str, layers: int, kv_heads: int, num_blocks: int, quota_pages: int, pool: str = "p") -> ModelSpec:
    return model_spec(
        name,
        pool=pool,
        layers=layers,
        kv_heads=kv_heads,
        block_tokens=16,
        num_blocks=num_blocks,
        quota_pages=quota_pages,
        max_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_concurrency=8,
        max_queue=8,
    )


def unit_spec(run_dir: Path, pages: int = PAGES, models: list[ModelSpec] | None = None) -> UnitSpec:
    two = [model("a", 2, 3, 20, 60), model("b", 1, 2, 40, 40)]
    return unit_spec_of(run_dir, two if models is None else models, PoolSpec("p", PAGE_BYTES, pages))


def ids(*blocks: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(blocks, dtype=np.int32)


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "little")


def stats_of(stats: dict[str, Any], name: str) -> dict[str, Any]:
    """The statistics of one model, or of one pool."""
    for entry in (*stats["models"], *stats["pools"]):
        if entry["name"] == name:
            return dict(entry)
    raise KeyError(name)


def assert_balanced(client: MemoryClient) -> None:
    """Every page is free, owned, handed off, cached or the null page, and the counters agree with the statistics."""
    stats = client.stats()
    for pool in stats["pools"]:
        kinds = ("free_pages", "owned_pages", "handed_pages", "cached_pages")
        assert sum(pool[kind] for kind in kinds) + 1 == pool["total_pages"], pool
        models = [entry for entry in stats["models"] if entry["pool"] == pool["name"]]
        for kind in kinds[1:]:
            assert sum(entry[kind] for entry in models) == pool[kind], (kind, stats)
