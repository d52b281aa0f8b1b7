"""Models that are withdrawn while requests are in service."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from muxserve.gateway.front_end import seam
from muxserve.gateway.front_end.served_models import OfferedModels
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.status.measure import Measures
from tests.gateway.unit_specs import model


class Broker:
    def detach(self, name: str) -> None: ...


async def test_a_model_that_leaves_has_a_gate_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in the fleet still, as something else; `/health` and `/fleet` tell of its queue all the time."""
    limiter = ConcurrencyLimiter([model("m")], 0, 1, Measures([], CollectorRegistry()))
    known: list[bool] = []

    async def look(*_: Any) -> None:
        known.append("m" in limiter.gates)

    monkeypatch.setattr(seam, "end", look)
    monkeypatch.setattr(seam, "forget_models", look)
    nothing: Any = None
    broker: Any = Broker()
    offered = OfferedModels(broker, limiter, nothing, nothing, lambda: known.append("m" in limiter.gates), 0, None)
    offered.models["m"] = offered._front_ends["m"] = nothing
    offered.withdraw("m")
    await offered._leaving["m"]
    assert known == [True, True, False]
