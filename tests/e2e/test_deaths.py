"""Each part killed, or stopped, during concurrent streams: every request still completes with the right tokens."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.fleet import Fleet, fleet_file, running
from tests.e2e.load import Load, stream_chat, until
from tests.e2e.reference import requests_for
from tests.support import preloaded
from tests.support.fresh_metrics import fresh_metrics
from tests.support.thoroughness import cases


@pytest.fixture(scope="module")
def fleet(quickstart: Fleet) -> Fleet:
    return quickstart


PARTS = {
    "prefill engine": ("engine", "atlas/prefill"),
    "decode engine": ("engine", "arithmetic/decode"),
    "another decode engine": ("engine", "frontdesk/decode"),
    "model parent": ("muxserve model", "arithmetic"),
    "unit scheduler": ("muxserve.unit.scheduler",),
    "memory manager": ("muxserve-memory-manager",),
    "warm parent": ("muxserve warm parent",),
    "vLLM": ("muxserve vLLM parent",),
}


KILLED, PAUSED, STOPPED = "killed", "stopped for 5 s", "stopped for good"
PAUSE_SECONDS = 5.0
EVERY = [(part, how) for how in (KILLED, PAUSED, STOPPED) for part in PARTS]
# Each part but those of which there is another one, and the one that the others wait for in each way.
SOME = [
    *((part, KILLED) for part in PARTS if part not in ("another decode engine", "warm parent")),
    ("memory manager", PAUSED),
    ("unit scheduler", STOPPED),
]
STREAMS = 6  # of each model


@pytest.mark.parametrize(("part", "how"), cases(EVERY, SOME))
async def test_streams_survive(fleet: Fleet, reference: dict[str, Any], part: str, how: str) -> None:
    await survive(fleet, reference, PARTS[part], how)


# Fleets with models of one engine: which ones have that, and the parts that they have.
SHAPES = {"a mix": ("arithmetic", "frontdesk"), "one engine each": ("arithmetic", "atlas", "frontdesk")}
IN_SHAPES = {part: PARTS[part] for part in ("model parent", "unit scheduler", "memory manager", "warm parent")}
IN_SHAPES |= {"engine": ("engine", "arithmetic/both"), "another engine": ("engine", "frontdesk/both")}
OF_SHAPES = [(shape, part, how) for shape in SHAPES for how in (KILLED, PAUSED, STOPPED) for part in IN_SHAPES]


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Fleet]]:
    """The fleet of a name of `SHAPES`; the one before is ended, since there is one for each core."""
    with ExitStack() as stack:
        there: list[str] = []

        def of(shape: str) -> Fleet:
            if there[:1] != [shape]:
                stack.close()
                changes = {name: {"engines": "one"} for name in SHAPES[shape]}
                path = fleet_file(tmp_path_factory.mktemp("shapes"), changes_of=changes)
                running_now.append(stack.enter_context(running(path, start=preloaded.start)))
                there[:] = [shape]
            return running_now[-1]

        running_now: list[Fleet] = []
        yield of


@pytest.mark.parametrize(("shape", "part", "how"), cases(OF_SHAPES, [("a mix", "engine", KILLED)]))
async def test_streams_survive_in_engines_of_both_phases(
    fleets: Callable[[str], Fleet], reference: dict[str, Any], shape: str, part: str, how: str
) -> None:
    await survive(await asyncio.to_thread(fleets, shape), reference, IN_SHAPES[part], how)


async def survive(fleet: Fleet, reference: dict[str, Any], words: tuple[str, ...], how: str) -> None:
    """Requests of all models have their answers although a part, found by its `words`, is killed or stopped."""
    async with Load(fleet, reference, per_model=STREAMS) as load:
        # Strike while streams are open: when the fleet reports requests in its decode engines.
        await load.until(lambda: decoding(fleet) >= 4, "busy")
        struck = fleet.part(*words)
        assert struck is not None
        struck.send_signal(signal.SIGKILL if how == KILLED else signal.SIGSTOP)
        load.enough()
        if how == PAUSED:
            await asyncio.sleep(PAUSE_SECONDS)
            # On a machine that is busy with other things it may have been longer, and too long.
            with contextlib.suppress(psutil.NoSuchProcess):
                struck.resume()
    assert len(load.answers) == len(load.models) * STREAMS
    assert not load.wrong

    def again() -> bool:
        there = fleet.part(*words)
        return there is not None and (how == PAUSED or there.pid != struck.pid)

    await until(again, f"there again: {words}")
    await asyncio.to_thread(fleet.wait_healthy)
    await until(lambda: fleet.get("/health").json()["status"] == "ok", "whole")
    await asyncio.to_thread(fleet.wait_pages_free)


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def decoding(fleet: Fleet) -> int:
    models = fleet.get("/fleet").json()["unit"]["state"]["models"]
    return sum(model["decoding"] for model in models.values())


async def test_death_of_the_gateway_frees_everything(fleet: Fleet, reference: dict[str, Any]) -> None:
    load = Load(fleet, reference, per_model=STREAMS)
    await load.__aenter__()
    await load.until(lambda: decoding(fleet) >= 4, "busy")
    fleet.kill("muxserve gateway")
    with pytest.raises(ExceptionGroup) as failed:
        await load.__aexit__()
    assert failed.value.split((openai.APIError, OSError))[1] is None, "clients are told of a connection that broke"
    await asyncio.to_thread(fleet.wait_pages_free)
    await asyncio.to_thread(fleet.wait_healthy)
    answer = await stream_chat(fleet.async_client(), "atlas", requests_for("atlas")[0])
    assert answer == reference["atlas"][0]


async def test_a_gateway_that_hangs_is_started_again(fleet: Fleet, reference: dict[str, Any]) -> None:
    before = hangs(fleet)
    gateway = fleet.part("muxserve gateway")
    assert gateway is not None
    gateway.suspend()
    await until(lambda: not gateway.is_running() or is_zombie(gateway), "killed")
    await asyncio.to_thread(fleet.wait_healthy)
    answer = await stream_chat(fleet.async_client(), "atlas", requests_for("atlas")[0])
    assert answer == reference["atlas"][0]
    await until(lambda: hangs(fleet) > before, "counted")


def hangs(fleet: Fleet) -> float:
    """How many hangs of gateways were counted so far."""
    lines = fresh_metrics(lambda: fleet.get("/metrics").text).splitlines()
    return sum(float(line.split()[-1]) for line in lines if 'muxserve_hangs_total{kind="gateway"}' in line)
