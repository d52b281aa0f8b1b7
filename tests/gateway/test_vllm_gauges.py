"""vLLM's gauges say what is, not what an engine said with its last tokens."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from muxserve.gateway.status.fleet_status import FleetStatus
from muxserve.gateway.status.vllm_metrics import Lean, VllmGauges
from muxserve.spec import ModelSpec
from tests.gateway.unit_specs import model

BUSY = {
    "queued": 3, "prefilling": 1, "handed": 1, "decoding": 4, "moving": 1, "used_pages": 30, "quota_pages": 100,
}  # fmt: skip
IDLE = {**dict.fromkeys(BUSY, 0), "cached_pages": 50, "quota_pages": 100}


def unit(name: str, answered: bool = True, **models: dict[str, int]) -> Any:
    return SimpleNamespace(name=name, answered=answered, models=lambda: models)


def shown(
    models: list[ModelSpec], *units: Any, lean: bool = True, memory: dict[str, Any] | None = None
) -> dict[str, float]:
    status: Any = SimpleNamespace(
        units={each.name: each for each in units},
        fleet=SimpleNamespace(models=models),
        resident=lambda name: (memory or {}).get(name, {}),
        asleep=lambda name: False,
    )
    status.replica_states = partial(FleetStatus.replica_states, status)
    gauges = VllmGauges(status)
    lines = generate_latest(Lean(gauges) if lean else gauges).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_an_idle_model_runs_nothing_and_uses_nothing() -> None:
    found = shown([model("m")], unit("u", m=IDLE))
    assert found == {
        'vllm:num_requests_running{model_name="m"}': 0.0,
        'vllm:num_requests_waiting{model_name="m"}': 0.0,
        'vllm:kv_cache_usage_perc{model_name="m"}': 0.0,
    }


def test_each_engine_has_its_own_and_the_model_their_sum() -> None:
    every = shown([model("m")], unit("u", m=BUSY), lean=False)
    assert every['vllm:num_requests_running{engine="0",model_name="m"}'] == 1
    assert every['vllm:num_requests_running{engine="1",model_name="m"}'] == 6
    assert every['vllm:num_requests_waiting{engine="0",model_name="m"}'] == 3
    assert every['vllm:num_requests_waiting{engine="1",model_name="m"}'] == 0
    assert every['vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"}'] == 3
    assert every['vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"}'] == 0
    lean = shown([model("m")], unit("u", m=BUSY))
    assert lean['vllm:num_requests_running{model_name="m"}'] == 7
    assert lean['vllm:num_requests_waiting{model_name="m"}'] == 3
    assert lean['vllm:kv_cache_usage_perc{model_name="m"}'] == pytest.approx(0.3)


@pytest.mark.parametrize(("one", "index"), [(model("m", shape="one", rolling=True), 1), (model("m", pooling=True), 0)])
def test_a_model_with_one_engine_has_one_series(one: ModelSpec, index: int) -> None:
    found = shown([one], unit("u", m=BUSY), lean=False)
    assert found[f'vllm:num_requests_running{{engine="{index}",model_name="m"}}'] == 7
    assert found[f'vllm:num_requests_waiting{{engine="{index}",model_name="m"}}'] == 3
    assert not [name for name in found if f'engine="{1 - index}"' in name]


def test_how_full_a_private_cache_is_nobody_says() -> None:
    found = shown([model("m", shape="one", kv="private")], unit("u", m={**BUSY, "used_pages": 0, "quota_pages": 0}))
    assert found['vllm:num_requests_running{model_name="m"}'] == 7
    assert 'vllm:kv_cache_usage_perc{model_name="m"}' not in found


def test_replicas_count_together_and_a_unit_that_is_gone_does_not() -> None:
    units = unit("u0", m=BUSY), unit("u1", m=IDLE), unit("u2", answered=False, m=BUSY)
    found = shown([model("m")], *units)
    assert found['vllm:num_requests_running{model_name="m"}'] == 7
    assert found['vllm:kv_cache_usage_perc{model_name="m"}'] == pytest.approx(0.15)
    assert shown([model("m")], units[2])['vllm:num_requests_running{model_name="m"}'] == 0


@pytest.mark.parametrize(
    ("resident", "state"),
    [
        ({}, "awake"),
        ({"residence": "awake"}, "awake"),
        ({"residence": "leaving"}, "awake"),
        ({"residence": "asleep"}, "discard_all"),
        ({"residence": "waking", "copy_bytes": 0}, "discard_all"),
        ({"residence": "asleep", "copy_bytes": 7}, "weights_offloaded"),
    ],
)
def test_a_model_that_sleeps_says_so(resident: dict[str, Any], state: str) -> None:
    found = shown([model("m")], unit("u"), lean=False, memory={"m": resident})
    of = 'vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="%s"}'
    assert {name for name in ("awake", "weights_offloaded", "discard_all") if found[of % name]} == {state}
