"""Four replicas of one model: a prompt that fits nowhere until others move, a death, a unit drained under load."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.fleet import ROOT, Fleet, running
from tests.e2e.load import stream_chat
from tests.e2e.reference import requests_for

MODEL = "atlas"
FLEET = {
    "policy": "adbs",
    # 16 blocks of 64 tokens for each replica, and the null page.
    "kv_pool": {"size": "3200KiB"},
    "migration": {"source_below": 16, "destination_above": 32},
    "models": [
        {
            "name": MODEL,
            "path": str(ROOT / "configs/models" / MODEL),
            "dtype": "float32",
            "replicas": 4,
            "max_len": 1024,
            "prefix_caching": False,
        }
    ],
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("replicas")
    path = directory / "fleet.yaml"
    path.write_text(yaml.safe_dump(FLEET))
    with running(path) as deployed:
        yield deployed


def units(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """The units' states by name."""
    return {unit["name"]: unit["state"] for unit in fleet.get("/fleet").json()["units"]}


def of_model(fleet: Fleet, key: str) -> dict[str, int]:
    """What each unit that answers says of the model."""
    return {name: state["models"][MODEL][key] for name, state in units(fleet).items() if state}


def free_tokens(fleet: Fleet) -> dict[str, int]:
    model = next(m for m in fleet.get("/fleet").json()["models"] if m["name"] == MODEL)
    block_pages = model["layers"] * model["kv_heads"]
    free = {}
    for name, state in units(fleet).items():
        (pool,) = state["pools"].values()
        free[name] = (pool["free_pages"] + pool["cached_pages"]) // block_pages * model["block_tokens"]
    return free


async def until(condition: Any, seconds: float, what: str) -> None:
    """Until `condition`, asked in a thread of its own, holds."""
    try:
        async with asyncio.timeout(seconds):
            while not await asyncio.to_thread(condition):
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not {what} within {seconds:.0f} s")


async def generate(fleet: Fleet, tokens: int, output: int, first: int, on_first: Any = None) -> list[str]:
    """Text pieces of one streamed completion of a prompt of `tokens` tokens."""
    prompt = [2 + (first + 7 * i) % 900 for i in range(tokens)]
    stream = await fleet.async_client().completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=output,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    pieces: list[str] = []
    async for chunk in stream:
        for choice in chunk.choices:
            if not pieces and on_first is not None:
                on_first()
            pieces.append(choice.text)
    return pieces


async def test_a_long_prompt_gets_room_by_moving_others(fleet: Fleet) -> None:
    moved_before = sum(of_model(fleet, "moved_out").values())
    done: list[int] = []

    async def filler(index: int) -> str:
        text = "".join(await generate(fleet, 420, 400, index))
        done.append(index)
        return text

    fillers = [asyncio.create_task(filler(index)) for index in range(4)]
    # One on each replica: they go to the freest, one after the other.
    await until(lambda: all(n == 1 for n in of_model(fleet, "decoding").values()), 60, "one on each")
    free = await asyncio.to_thread(free_tokens, fleet)
    need = 700
    assert all(tokens < need for tokens in free.values()), f"the long prompt has room as it is: {free}"

    finished_at_first_token: list[int] = []
    long = await generate(fleet, need, 4, 99, lambda: finished_at_first_token.append(len(done)))
    assert finished_at_first_token == [0], "it waited for another request's end"
    assert len(long) >= 1
    assert sum(of_model(fleet, "moved_out").values()) > moved_before
    texts = await asyncio.gather(*fillers)
    # What moved has the tokens of what did not.
    for index, text in enumerate(texts):
        assert "".join(await generate(fleet, 420, 400, index)) == text


async def load(fleet: Fleet, reference: dict[str, Any], count: int = 64, concurrency: int = 32) -> dict[int, Any]:
    """Answers that are not stock vLLM's, of `count` streamed chats."""
    gate = asyncio.Semaphore(concurrency)
    client = fleet.async_client()
    wrong: dict[int, Any] = {}

    async def one(index: int, request: dict[str, Any]) -> None:
        async with gate:
            answer = await stream_chat(client, MODEL, request)
            if answer != reference[MODEL][index]:
                wrong[index] = (answer, reference[MODEL][index])

    await asyncio.gather(*(one(index, request) for index, request in enumerate(requests_for(MODEL)[:count])))
    return wrong


def processes_of(fleet: Fleet, unit: str) -> list[psutil.Process]:
    """Every process of a unit: those that name its directory, and its engines with what they were forked from."""
    state = units(fleet)[unit]
    engines = {engine["pid"] for engine in state["engines"].values()}
    found = []
    for process in fleet.processes():
        try:
            line = " ".join(process.cmdline())
            if process.pid in engines or f"/{unit}/" in line:
                found.append(process)
                parent = process.parent()
                if process.pid in engines and parent is not None and "engine" not in line.split("muxserve")[0]:
                    found.append(parent)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != fleet.process.pid]


async def test_a_killed_replica_loses_no_stream(fleet: Fleet, reference: dict[str, Any]) -> None:
    streams = asyncio.create_task(load(fleet, reference))
    await until(lambda: of_model(fleet, "decoding").get("u1", 0) >= 2, 60, "busy")
    killed = await asyncio.to_thread(processes_of, fleet, "u1")
    assert len(killed) >= 4, killed
    for process in killed:
        process.send_signal(signal.SIGKILL)
    assert not await streams
    # It comes back.
    await asyncio.to_thread(fleet.wait_healthy)
    await until(lambda: set(of_model(fleet, "decoding")) == {"u0", "u1", "u2", "u3"}, 60, "all there")


def command(fleet: Fleet, *words: str) -> subprocess.CompletedProcess[str]:
    """A command on this fleet, as its user would run it."""
    manager = fleet.part("muxserve-memory-manager")
    assert manager is not None
    line = manager.cmdline()
    identity = Path(line[line.index("--socket") + 1]).parent.parent.name
    return subprocess.run(
        [sys.executable, "-m", "muxserve.cli.app", *words, "--fleet", identity],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )


async def test_a_unit_drained_under_load_fails_no_request(fleet: Fleet, reference: dict[str, Any]) -> None:
    drained = asyncio.Event()
    rounds: list[dict[int, Any]] = []

    async def load_until_drained() -> None:
        while not drained.is_set():
            rounds.append(await load(fleet, reference))

    streams = asyncio.create_task(load_until_drained())
    await until(lambda: of_model(fleet, "decoding").get("u2", 0) >= 2, 60, "busy")
    done = await asyncio.to_thread(command, fleet, "drain", "u2")
    drained.set()
    await streams
    assert done.returncode == 0, done.stdout + done.stderr
    assert "u2" not in units(fleet)
    assert not any(rounds), rounds
    # And back again.
    scaled = await asyncio.to_thread(command, fleet, "scale", f"{MODEL}=4")
    assert scaled.returncode == 0, scaled.stdout + scaled.stderr
    assert len(units(fleet)) == 4
