"""`muxserve deploy` of a model split over two ranks: a worker or the memory manager dies, and no request does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from tests.e2e.fleet import Fleet, fleet_file, running
from tests.e2e.load import Load, stream_chat, until
from tests.e2e.reference import requests_for
from tests.support import preloaded

MODEL = "arithmetic"


@pytest.mark.thorough
async def test_requests_survive_the_death_of_a_worker_and_of_the_memory_manager(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, cluster={"ranks": 2})
    fleet_of_three = yaml.safe_load(path.read_text())
    fleet_of_three["models"] = [each for each in fleet_of_three["models"] if each["name"] == MODEL]
    path.write_text(yaml.safe_dump(fleet_of_three))
    with running(path, start=preloaded.start) as fleet:
        workers = fleet.parts(" rank ")
        assert len(workers) == 4
        async with fleet.async_client() as client:
            undisturbed = await asyncio.gather(*(stream_chat(client, MODEL, each) for each in requests_for(MODEL)[:12]))
        for victim in (("worker arithmetic/decode", "rank 1"), ("worker arithmetic/prefill", "rank 0"),
                       ("muxserve-memory-manager",)):  # fmt: skip
            async with Load(fleet, {MODEL: undisturbed}, [MODEL], len(undisturbed)) as load:
                await load.until(lambda: serving(fleet) >= 4, "busy")
                fleet.kill(*victim)
            assert not load.wrong, victim
            assert len(load.answers) == len(undisturbed)
            await asyncio.to_thread(fleet.wait_healthy)
            await asyncio.to_thread(fleet.wait_pages_free)
        await until(
            lambda: not any(process.is_running() for process in workers), "without the workers, also as zombies"
        )


def serving(fleet: Fleet) -> int:
    models = fleet.get("/fleet").json()["unit"]["state"]["models"]
    return int(models[MODEL]["decoding"])
