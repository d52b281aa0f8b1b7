"""Specs of units for the gateway's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from muxserve.spec import FleetSpec, GatewaySpec, ModelSpec, PoolSpec, UnitEntry, UnitSpec
from tests.support.unit_specs import model_spec, unit_spec_of


def model(name: str, path: Path | str = "", **changes: Any) -> ModelSpec:
    """A model as a fleet would deploy it; its shape is read from `path` if that is a checkpoint."""
    config: dict[str, Any] = {}
    if path:
        config = json.loads((Path(path) / "config.json").read_text())
    values: dict[str, Any] = {
        "path": str(path),
        "layers": config.get("num_hidden_layers", 2),
        "kv_heads": config.get("num_key_value_heads", 2),
        "head_dim": config.get("head_dim", 64),
        "block_tokens": 64 * 64 // config.get("head_dim", 64),
        "num_blocks": 256,
    }
    return model_spec(name, **{**values, **changes})


def unit_spec(run_dir: Path | str, models: list[ModelSpec], unit: str = "test") -> UnitSpec:
    """A deployment of `models`."""
    return unit_spec_of(run_dir, models, PoolSpec("main", 32768, 2000), unit=unit)


def fleet_of(run_dir: Path | str, models: list[ModelSpec], unit: str = "test", **gateway: Any) -> FleetSpec:
    """A fleet of one unit, which is in the same directory, and a gateway with these settings on a loopback port."""
    one = unit_spec(run_dir, models, unit)
    return FleetSpec(
        run_dir=one.run_dir,
        gateway=GatewaySpec(**{"host": "127.0.0.1", "port": 0, **gateway}),
        models=models,
        units=[UnitEntry(one, one.unit_address, one.migrator_address, [model.name for model in models])],
    )
