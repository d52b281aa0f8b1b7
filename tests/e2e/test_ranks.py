"""`muxserve deploy` of a model split over two ranks: a worker or the memory manager dies, and no request does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.fleet import Fleet, fleet_file, running
from tests.e2e.load import stream_chat
from tests.e2e.reference import requests_for
from tests.support.patience import PATIENCE

MODEL = "arithmetic"


async def load(fleet: Fleet) -> list[dict[str, Any]]:
    async with fleet.async_client() as client:
        return await asyncio.gather(*(stream_chat(client, MODEL, request) for request in requests_for(MODEL)[:24]))


async def test_requests_survive_the_death_of_a_worker_and_of_the_memory_manager(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, cluster={"ranks": 2})
    fleet_of_three = yaml.safe_load(path.read_text())
    fleet_of_three["models"] = [each for each in fleet_of_three["models"] if each["name"] == MODEL]
    path.write_text(yaml.safe_dump(fleet_of_three))
    with running(path) as fleet:
        workers = fleet.parts(" rank ")
        assert len(workers) == 4
        undisturbed = await load(fleet)
        for victim in (("worker arithmetic/decode", "rank 1"), ("worker arithmetic/prefill", "rank 0"),
                       ("muxserve-memory-manager",)):  # fmt: skip
            answers = asyncio.create_task(load(fleet))
            await asyncio.to_thread(fleet.wait, lambda: serving(fleet) >= 4, PATIENCE, "busy")
            fleet.kill(*victim)
            assert await answers == undisturbed, victim
            await asyncio.to_thread(fleet.wait_healthy)
            await asyncio.to_thread(fleet.wait_pages_free)
        assert not any(process.is_running() for process in workers)  # nor zombies


def serving(fleet: Fleet) -> int:
    models = fleet.get("/fleet").json()["unit"]["state"]["models"]
    return int(models[MODEL]["decoding"])
