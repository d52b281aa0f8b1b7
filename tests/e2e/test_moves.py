"""Models that move between units while they serve, since KV is short where they are."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from tests.e2e.fleet import ROOT, START_SECONDS, Fleet, running
from tests.e2e.load import until
from tests.e2e.several import units
from tests.support import preloaded
from tests.support.fresh_metrics import fresh_metrics
from tests.support.patience import PATIENCE

ATLAS = {"path": str(ROOT / "configs/models/atlas"), "dtype": "float32", "max_len": 512, "prefix_caching": False}
FLEET = {
    "policy": "adbs",
    # 74 blocks of 32 tokens in each unit: too few for many long answers of two models.
    "kv_pool": {"size": "7MiB"},
    "migration": {"source_below": 16, "destination_above": 32, "models": {"period": "2s", "residence": "1s"}},
    # u0 has them all, u1 the one with two replicas.
    "models": [
        {"name": name, "replicas": 2 if name == "both" else 1, "limits": {"max_wait": "none"}, **ATLAS}
        for name in ("a", "b", "c", "both")
    ],
}
PROMPT, ANSWER = 80, 400


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    path = tmp_path_factory.mktemp("moves") / "fleet.yaml"
    path.write_text(yaml.safe_dump(FLEET))
    with running(path, start=preloaded.start) as deployed:
        yield deployed


async def generate(fleet: Fleet, model: str) -> str:
    stream = await fleet.async_client().completions.create(
        model=model,
        prompt=[2 + 7 * i % 900 for i in range(PROMPT)],
        max_tokens=ANSWER,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return "".join([choice.text async for chunk in stream for choice in chunk.choices])


def moves(fleet: Fleet) -> dict[str, Any]:
    found: dict[str, Any] = fleet.get("/fleet").json()["moves"] or {}
    return found


def status_of(fleet: Fleet) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "muxserve.cli.app", "status", "--url", fleet.url]
    return subprocess.run(line, capture_output=True, text=True, timeout=4 * PATIENCE)


def serves(fleet: Fleet) -> dict[str, set[str]]:
    return {unit["name"]: set(unit["serves"]) for unit in fleet.get("/fleet").json()["units"]}


def engines_of(fleet: Fleet, unit: str, model: str) -> list[psutil.Process]:
    state = units(fleet)[unit]
    pids = [engine["pid"] for name, engine in state["engines"].items() if name.startswith(f"{model}/")]
    return [psutil.Process(pid) for pid in pids if pid]


@contextlib.asynccontextmanager
async def pressed(fleet: Fleet, models: tuple[str, ...], texts: set[str]) -> AsyncIterator[Callable[[], None]]:
    """Six streams of each model at a time until the end of the block; `texts` gets their answers."""
    stop = asyncio.Event()

    async def ask(model: str) -> None:
        while not stop.is_set():
            texts.add(await generate(fleet, model))

    async with asyncio.TaskGroup() as group:
        for model in models * 6:
            group.create_task(ask(model))
        try:
            yield stop.set
        finally:
            stop.set()


@pytest.mark.thorough
async def test_a_model_moves_away_from_pressure_and_every_stream_goes_on(fleet: Fleet) -> None:
    assert serves(fleet) == {"u0": {"a", "b", "c", "both"}, "u1": {"both"}}
    texts = {await generate(fleet, "a")}
    async with pressed(fleet, ("a", "b"), texts):
        await until(lambda: bool(moves(fleet)) and moves(fleet)["moved"] == 1, "moved", START_SECONDS)
        last = moves(fleet)["last"]
    assert (last["source"], last["destination"], last["error"]) == ("u0", "u1", None)
    assert last["model"] in ("a", "b")
    assert serves(fleet) == {"u0": {"a", "b", "c", "both"} - {last["model"]}, "u1": {"both", last["model"]}}
    # One model, under three names: the same tokens, wherever they were computed.
    assert len(texts) == 1
    status = await asyncio.to_thread(status_of, fleet)
    assert status.returncode == 0, status.stderr
    assert "moves of models: 1 done, 0 failed" in status.stdout
    assert f"last: {last['model']} from u0 to u1, " in status.stdout
    assert 'muxserve_model_moves_total{result="moved"} 1.0' in fresh_metrics(lambda: fleet.get("/metrics").text)


@pytest.mark.thorough
async def test_a_death_in_the_middle_of_a_move_loses_nothing(fleet: Fleet) -> None:
    """The engines of the new replica, those of the old one, and the global scheduler: all at once."""
    (stayed,) = serves(fleet)["u0"] & {"a", "b"}
    texts = {await generate(fleet, "c")}
    async with pressed(fleet, (stayed, "c"), texts):
        await until(lambda: any({stayed, "c"} & serves(fleet)["u1"]), "moving", START_SECONDS)
        (model,) = {stayed, "c"} & serves(fleet)["u1"]
        victims = [*engines_of(fleet, "u1", model), *engines_of(fleet, "u0", model)]
        victims += fleet.parts("muxserve.global_scheduler")
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await until(lambda: model not in serves(fleet)["u0"], "moved", START_SECONDS)
    assert model in serves(fleet)["u1"]
    assert len(texts) == 1


@pytest.mark.thorough
async def test_nothing_is_left_of_a_fleet_whose_controller_is_killed_during_a_move(fleet: Fleet) -> None:
    """Back to the unit that knows them, whose pool is free by now."""
    models = serves(fleet)["u1"] - {"both"}
    assert len(models) == 2

    async def ask(model: str) -> None:
        while True:
            await generate(fleet, model)

    asking = [asyncio.create_task(ask(model)) for model in sorted(models) * 6]
    moving = asyncio.create_task(until(lambda: bool(models & serves(fleet)["u0"]), "moving", START_SECONDS))
    await asyncio.wait([moving, *asking], return_when=asyncio.FIRST_COMPLETED)
    assert moving.done(), [task.exception() for task in asking if task.done()]
    await moving
    fleet.process.send_signal(signal.SIGKILL)
    fleet.exit_code = -signal.SIGKILL
    for result in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(result, openai.OpenAIError | httpx.HTTPError)
    await until(lambda: not fleet.left(), "ended")
