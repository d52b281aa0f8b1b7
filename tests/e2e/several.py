"""What tests of fleets with several units see, ask and do."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.fleet import ROOT, Fleet
from tests.e2e.load import stream_chat
from tests.e2e.reference import requests_for
from tests.support.patience import PATIENCE


def units(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """The units' states by name."""
    return {unit["name"]: unit["state"] for unit in fleet.get("/fleet").json()["units"]}


def of_model(fleet: Fleet, model: str, key: str) -> dict[str, Any]:
    """What each unit that answers says of a model that it serves."""
    return {name: state["models"][model][key] for name, state in units(fleet).items() if state}


async def busy_unit(fleet: Fleet, model: str, decoding: int = 2) -> str:
    """Wait for a unit that decodes so many requests of a model; which one that is depends on the machine."""
    busy: list[str] = []

    def there() -> bool:
        busy[:] = [name for name, count in of_model(fleet, model, "decoding").items() if count >= decoding]
        return bool(busy)

    await until(there, PATIENCE, f"{decoding} requests of {model} in a unit")
    return busy[0]


async def until(condition: Any, seconds: float, what: str) -> None:
    """Until `condition`, asked in a thread of its own, holds."""
    try:
        async with asyncio.timeout(seconds):
            while not await asyncio.to_thread(condition):
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not {what} within {seconds:.0f} s")


async def load(
    fleet: Fleet, model: str, reference: dict[str, Any], count: int = 64, concurrency: int = 32
) -> dict[int, Any]:
    """Answers that are not stock vLLM's, of `count` streamed chats."""
    gate = asyncio.Semaphore(concurrency)
    client = fleet.async_client()
    wrong: dict[int, Any] = {}

    async def one(index: int, request: dict[str, Any]) -> None:
        async with gate:
            answer = await stream_chat(client, model, request)
            if answer != reference[model][index]:
                wrong[index] = (answer, reference[model][index])

    await asyncio.gather(*(one(index, request) for index, request in enumerate(requests_for(model)[:count])))
    return wrong


class Busy:
    """Load without end: `async with Busy(...) as busy`, and afterwards `busy.wrong` is what was not as it should be."""

    def __init__(self, fleet: Fleet, model: str, reference: dict[str, Any]) -> None:
        self.wrong: list[dict[int, Any]] = []
        self._load = lambda: load(fleet, model, reference)
        self._enough = False

    async def _go_on(self) -> None:
        while not self._enough:
            if wrong := await self._load():
                self.wrong.append(wrong)

    async def __aenter__(self) -> Busy:
        self._task = asyncio.create_task(self._go_on())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._enough = True
        if error[0] is not None:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=error[0] is not None)


def processes_of(fleet: Fleet, unit: str) -> list[psutil.Process]:
    """Every process of a unit: those that name its directory, and its engines with what they were forked from."""
    state = units(fleet)[unit]
    engines = {engine["pid"] for engine in state["engines"].values()}
    found = []
    for process, words in fleet.commands():
        line = " ".join(words)
        with contextlib.suppress(psutil.Error):
            if process.pid in engines or f"/{unit}/" in line:
                found.append(process)
                parent = process.parent()
                if process.pid in engines and parent is not None and "engine" not in line.split("muxserve")[0]:
                    found.append(parent)
    return [process for process in found if process.pid != fleet.process.pid]


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
