"""Specs of models and units for tests, of which only what a test is about need be said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muxserve.spec import ModelSpec, PoolSpec, UnitSpec


def model_spec(name: str, **changes: Any) -> ModelSpec:
    """A small model as a fleet would deploy it."""
    values: dict[str, Any] = {
        "name": name,
        "path": "",
        "pool": "main",
        "dtype": "float32",
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 64,
        "block_tokens": 64,
        "num_blocks": 128,
        "quota_pages": 1000,
        "floor_pages": 0,
        "max_len": 1024,
        "rate": 1.0,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "prefix_caching": True,
        "threads": 1,
        "prefill_share": 0.5,
        "decode_share": 0.5,
        "max_concurrency": 64,
        "max_queue": 64,
    }
    return ModelSpec(**{**values, **changes})


def unit_spec_of(run_dir: Path | str, models: Sequence[ModelSpec], *pools: PoolSpec, **changes: Any) -> UnitSpec:
    """A unit of these models and pools on two cores."""
    values: dict[str, Any] = {"unit": "test", "policy": "adbs", "cores": 2}
    return UnitSpec(run_dir=str(run_dir), models=[*models], pools=[*pools], **{**values, **changes})
