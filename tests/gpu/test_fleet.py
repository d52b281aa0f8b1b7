"""A fleet on a GPU: tokens of stock vLLM, through every way of sharing, and over the death of each process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import Fleet, fleet_file, running
from tests.gpu.load import CLUSTER, MODEL, all_answers, check
from tests.gpu.trial.runner import finding

WAYS: dict[str, dict[str, Any]] = {
    "mps": {"cluster": {**CLUSTER, "mps": "on", "sm_sharing": "mps"}},
    "green contexts": {"cluster": {**CLUSTER, "mps": "on", "sm_sharing": "green_contexts"}},
    "shares per lease": {
        "cluster": {**CLUSTER, "mps": "on", "sm_sharing": "green_contexts"},
        "policy": "slack",
        "model_changes": {**MODEL, "engine_args": {"enforce_eager": False}},
    },
    "time slices": {"cluster": {**CLUSTER, "mps": "off"}},
    "chunked prefill": {"cluster": CLUSTER, "model_changes": {**MODEL, "max_num_batched_tokens": 64}},
    "tight pool": {"cluster": CLUSTER, "kv_pool": {"size": "24MiB"}},
    "piecewise graphs": {"cluster": CLUSTER, "model_changes": {**MODEL, "engine_args": {"enforce_eager": False}}},
    "full graphs": {
        "cluster": CLUSTER,
        "model_changes": {
            **MODEL,
            "engine_args": {
                "enforce_eager": False,
                "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
            },
        },
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_stock_vllm(way: str, tmp_path: Path, reference: dict[str, Any]) -> None:
    changes = dict(WAYS[way])
    file = fleet_file(tmp_path, changes.pop("model_changes", MODEL), **changes)
    with running(file, seconds=600) as fleet:
        answers = asyncio.run(all_answers(fleet, reference))
        print(way, check(answers, reference))
        fleet.wait_pages_free()


@pytest.mark.parametrize(("limit", "resting"), [("10GiB", "4GiB"), ("6GiB", "off")])
def test_models_that_sleep_answer_as_before(
    limit: str, resting: str, tmp_path: Path, reference: dict[str, Any]
) -> None:
    """Memory for about two of the three models: with engines that rest, with their graphs, and with new ones."""
    memory = {"limit": limit, "min_residence": 0, "resting_engines": resting}
    graphs = {**MODEL, "engine_args": {"enforce_eager": False}}
    with running(fleet_file(tmp_path, graphs, cluster={"gpus": 1, "mps": "off"}, memory=memory), seconds=600) as fleet:
        for number in range(3):
            answers = asyncio.run(all_answers(fleet, reference))
            print(f"resting engines: {resting}, round {number}", check(answers, reference))
        models = fleet.get("/fleet").json()["memory"]["models"]
        print({name: (each["wakes"], each["turns"], each["last_wake_seconds"]) for name, each in models.items()})
        assert any(each["wakes"] > 1 for each in models.values()), "none has slept"


PARTS = {
    "prefill engine": ("engine", "atlas/prefill"),
    "decode engine": ("engine", "arithmetic/decode"),
    "weight holder": ("muxserve weights", "frontdesk"),
    "unit scheduler": ("muxserve.unit.scheduler",),
    "memory manager": ("muxserve-memory-manager",),
    "warm parent": ("muxserve warm parent",),
    "MPS server": ("nvidia-cuda-mps-server",),
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    file = fleet_file(tmp_path_factory.mktemp("fleet"), MODEL, cluster=CLUSTER)
    with running(file, seconds=600) as deployed:
        yield deployed


@pytest.mark.parametrize("part", PARTS)
def test_requests_survive(fleet: Fleet, reference: dict[str, Any], part: str) -> None:
    if fleet.part(*PARTS[part]) is None:
        pytest.skip(f"this fleet has no {part}")

    async def scenario() -> list[tuple[str, int, list[int]]]:
        killed = asyncio.Event()
        load = asyncio.create_task(all_answers(fleet, reference, killed))
        await asyncio.to_thread(fleet.wait, lambda: decoding(fleet) >= 4, 60, "busy")
        fleet.kill(*PARTS[part])
        killed.set()
        return await load

    finding(f"requests survive the death of the {part}: {check(asyncio.run(scenario()), reference)}")
    fleet.wait_healthy(300)
    fleet.wait_pages_free()


def decoding(fleet: Fleet) -> int:
    models = fleet.get("/fleet").json()["unit"]["state"]["models"]
    return sum(model["decoding"] for model in models.values())
