"""A model with a cache of vLLM's own beside models on the pool of the same unit: the same tokens as stock vLLM's,
through deaths, and through sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.fleet import START_SECONDS, Fleet, fleet_file, running
from tests.e2e.load import Load, ask_each, until
from tests.support import preloaded
from tests.support.patience import PATIENCE
from tests.support.thoroughness import cases
from tests.support.tiny_private import tiny_private

OWN, POOLED = "arithmetic", "frontdesk"
# What is killed, by words of its command line.
PARTS = {
    "engine": ("engine", f"{OWN}/both"),
    "unit scheduler": ("muxserve.unit.scheduler",),
    "memory manager": ("muxserve-memory-manager",),
    "model parent": ("muxserve model", OWN),
}
COUNT = 24


def both(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """What `/fleet` says of the models."""
    return {model["name"]: model for model in fleet.get("/fleet").json()["models"]}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    changes = {OWN: {"kv": "private"}}
    path = fleet_file(tmp_path_factory.mktemp("private"), changes_of=changes, without=["atlas"])
    with running(path, start=preloaded.start) as deployed:
        yield deployed


async def test_both_answer_as_stock_vllm_does(fleet: Fleet, reference: dict[str, Any]) -> None:
    assert not (await ask_each(fleet, reference, [OWN, POOLED])).wrong
    told = both(fleet)
    assert (told[OWN]["kv"], told[POOLED]["kv"]) == ("private", "pool")
    assert told[OWN]["kv_bytes"] > 0
    (unit,) = fleet.get("/fleet").json()["units"]
    assert set(unit["state"]["engines"]) == {f"{OWN}/both", f"{POOLED}/prefill", f"{POOLED}/decode"}
    assert unit["state"]["models"][OWN]["returned"] == 0


@pytest.mark.parametrize("part", cases(PARTS, ["engine"]))
async def test_streams_survive_a_death(fleet: Fleet, reference: dict[str, Any], part: str) -> None:
    async with Load(fleet, reference, [OWN, POOLED], COUNT) as busy:
        await busy.until(lambda: _decoding(fleet) > 2, "decoding")
        killed = fleet.kill(*PARTS[part])
        busy.enough()
    assert not busy.wrong

    def again() -> bool:
        there = fleet.part(*PARTS[part])
        return there is not None and there.pid != killed

    await until(again, f"there again: {part}", START_SECONDS)
    await until(lambda: fleet.get("/health").json()["status"] == "ok", "whole", START_SECONDS)
    assert not (await ask_each(fleet, reference, [OWN, POOLED], 4)).wrong


def _decoding(fleet: Fleet) -> int:
    (unit,) = fleet.get("/fleet").json()["units"]
    state = unit["state"]
    return state["models"][OWN]["decoding"] if state else 0


@pytest.mark.thorough
async def test_it_sleeps_and_wakes(tmp_path: Path, reference: dict[str, Any]) -> None:
    """Of two models only one has room at a time, so that each request wakes one."""
    path = fleet_file(
        tmp_path,
        {"replicas": {"max": 1, "wake": 4 * PATIENCE}},
        {OWN: {"kv": "private"}},
        without=["atlas"],
        memory={"limit": 1400 << 20, "min_residence": "200ms", "hibernate": "off"},
        kv_pool={"size": "64MiB"},
    )
    with running(path, start=preloaded.start) as deployed:
        for _ in range(2):
            for model in (OWN, POOLED):
                assert not (await ask_each(deployed, reference, [model], 4, 4)).wrong
        wakes = deployed.get("/fleet").json()["memory"]["models"][OWN]["wakes"]
        assert wakes > 0


@pytest.mark.thorough
def test_what_the_pool_cannot_hold_is_served_and_said(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, without=["atlas", OWN])
    declared = yaml.safe_load(path.read_text())
    declared["models"].append({"name": "chunked", "path": str(tiny_private("llama4")), "dtype": "float32"})
    path.write_text(yaml.safe_dump(declared))
    with running(path, start=preloaded.start) as deployed:
        answer = deployed.client.completions.create(model="chunked", prompt="What is 12 + 7?", max_tokens=20)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        shown = deployed.command("validate", str(path))
        assert "it uses chunked attention" in " ".join(shown.stdout.split())
        assert both(deployed)["chunked"]["kv"] == "private"
