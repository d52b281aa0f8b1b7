"""`muxserve deploy` of models of either shape, split over two ranks: a worker or the memory manager dies, and no
request does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, fleet_file, running
from tests.e2e.load import Load, stream_chat, until
from tests.e2e.reference import requests_for
from tests.support import preloaded

COUNT = 12
# With two engines and with one.
MODEL, ONE_ENGINE = MODELS = ("arithmetic", "frontdesk")


@pytest.mark.thorough
async def test_requests_survive_the_death_of_a_worker_and_of_the_memory_manager(tmp_path: Path) -> None:
    changes = {ONE_ENGINE: {"engines": "one"}}
    path = fleet_file(tmp_path, changes_of=changes, without=("atlas",), cluster={"ranks": 2})
    with running(path, start=preloaded.start) as fleet:
        workers = fleet.parts(" rank ")
        assert len(workers) == 6
        async with fleet.async_client() as client:
            undisturbed = {
                model: await asyncio.gather(*(stream_chat(client, model, each) for each in requests_for(model)[:COUNT]))
                for model in MODELS
            }
        for victim in (("worker arithmetic/decode", "rank 1"), ("worker arithmetic/prefill", "rank 0"),
                       ("worker frontdesk/both", "rank 1"), ("muxserve-memory-manager",)):  # fmt: skip
            async with Load(fleet, undisturbed, [*MODELS], COUNT) as load:
                await load.until(lambda: serving(fleet) >= 2, "busy")
                fleet.kill(*victim)
            assert not load.wrong, victim
            assert len(load.answers) == COUNT * len(MODELS)
            await asyncio.to_thread(fleet.wait_healthy)
            await asyncio.to_thread(fleet.wait_pages_free)
        await until(
            lambda: not any(process.is_running() for process in workers), "without the workers, also as zombies"
        )


def serving(fleet: Fleet) -> int:
    models = fleet.get("/fleet").json()["unit"]["state"]["models"]
    return min(int(models[model]["decoding"]) for model in MODELS)
