"""What tests of fleets with several units see, ask and do."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.fleet import Fleet
from tests.e2e.load import Load


def units(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """The units' states by name."""
    return {unit["name"]: unit["state"] for unit in fleet.get("/fleet").json()["units"]}


def of_model(fleet: Fleet, model: str, key: str) -> dict[str, Any]:
    """What each unit that answers says of a model that it serves."""
    states = units(fleet).items()
    return {name: state["models"][model][key] for name, state in states if state and model in state["models"]}


async def busy_unit(load: Load, fleet: Fleet, model: str, decoding: int = 2) -> str:
    """Wait for a unit that decodes so many requests of a model; which one that is depends on the machine."""
    busy: list[str] = []

    def there() -> bool:
        busy[:] = [name for name, count in of_model(fleet, model, "decoding").items() if count >= decoding]
        return bool(busy)

    await load.until(there, f"decoding {decoding} requests of {model} in a unit")
    return busy[0]


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


def run_directory(fleet: Fleet) -> Path:
    """Where the fleet's files and sockets are."""
    manager = fleet.part("muxserve-memory-manager")
    assert manager is not None
    line = manager.cmdline()
    return Path(line[line.index("--socket") + 1]).parent.parent


def command(fleet: Fleet, *words: str) -> subprocess.CompletedProcess[str]:
    """A command on this fleet, as its user would run it."""
    return fleet.command(*words, "--fleet", run_directory(fleet).name)


def kill_all(processes: list[psutil.Process]) -> None:
    """At once; some end with others."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
