"""What `test_fleet.py` runs, with Ray importable: `muxserve deploy` with two units of one model on two nodes, of which
one is killed while it serves. With `--come-back` a node is added afterwards, on which Ray starts the unit again; that
takes another minute and is not part of the tests. Then a unit is drained while it serves: its requests move over TCP.

    PYTHONPATH=$PWD:$PWD/build/ray python -m tests.ray.live --come-back
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import yaml

from tests.e2e.fleet import QUICKSTART, Fleet, fleet_file, running
from tests.ray.cluster import Nodes, nodes
from tests.support.patience import PATIENCE

HEAD, ONE, OTHER, THIRD = "127.0.1.2", "127.0.1.3", "127.0.1.4", "127.0.1.5"
MODEL, JOINS = "arithmetic", "atlas"
STREAMS, TOKENS = 8, 200
TRIES = 20


def fleet_of_two(directory: Path, address: str) -> Path:
    """One model of the quickstart, twice."""
    cluster = {"cores": 1, "launcher": "ray", "ray": {"address": address}}
    others = ("atlas", "frontdesk")
    return fleet_file(directory, {"replicas": 2}, without=others, kv_pool={"size": "64MiB"}, cluster=cluster)


def units(fleet: Fleet) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fleet.get("/fleet").json()["units"]
    return found


def command(fleet: Fleet, *words: str) -> None:
    done = fleet.command(*words)
    assert done.returncode == 0, done.stdout + done.stderr


def join(fleet: Fleet, directory: Path) -> None:
    """Another model of the quickstart joins the unit of one node."""
    model = next(each for each in yaml.safe_load(QUICKSTART.read_text())["models"] if each["name"] == JOINS)
    model["path"] = str((QUICKSTART.parent / model["path"]).resolve())
    file = directory / "joins.yaml"
    file.write_text(yaml.safe_dump({"models": [model]}))
    command(fleet, "add", str(file), "--unit", "u0")
    answer_of(fleet)


def answer_of(fleet: Fleet) -> None:
    assert fleet.client.completions.create(model=JOINS, prompt="1", max_tokens=5).choices[0].text


def in_flight(fleet: Fleet) -> list[int]:
    """Requests in each unit."""
    return [unit["requests_in_flight"] for unit in units(fleet)]


def engines_up(fleet: Fleet) -> list[str]:
    """What `/metrics` says of engines."""
    lines = fleet.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("muxserve_engine_up{") and line.endswith(" 1.0")]


def whole(process: psutil.Process) -> list[psutil.Process]:
    """The process and everything below it."""
    return [process, *process.children(recursive=True)]


def kill_machine(cluster: Nodes, host: str) -> None:
    """Everything on that node at once, as when its power fails."""
    raylet = cluster.process(host)
    doomed = whole(raylet)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with another
            process.kill()
    cluster.forget(host)
    psutil.wait_procs(doomed, PATIENCE)


async def stream(client: openai.AsyncOpenAI, number: int, begun: list[asyncio.Event]) -> str:
    text = ""
    answer = await client.completions.create(
        model=MODEL, prompt=f"{number}", max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async for chunk in answer:
        text += chunk.choices[0].text
        begun[number].set()
    return text


async def streams(fleet: Fleet, meanwhile: Any = None) -> list[str]:
    client = fleet.async_client()
    begun = [asyncio.Event() for _ in range(STREAMS)]
    work = [asyncio.create_task(stream(client, number, begun)) for number in range(STREAMS)]
    if meanwhile is not None:
        for event in begun:
            await event.wait()
        await asyncio.to_thread(meanwhile)
    texts = await asyncio.gather(*work)
    await client.close()
    return texts


def streams_survive(fleet: Fleet, cluster: Nodes, host: str, wanted: list[str]) -> None:
    """That node is killed while both units serve, and all streams say what is wanted."""
    killed: list[list[int]] = []

    def kill() -> None:
        serving = in_flight(fleet)
        if all(serving):
            kill_machine(cluster, host)
            killed.append(serving)

    # On a machine that is busy otherwise a unit may just be thought to be down.
    for _ in range(TRIES):
        assert asyncio.run(streams(fleet, kill)) == wanted, f"tokens are others; killed: {killed}"
        if killed:
            break
    assert killed, "never did both units serve"


def main() -> None:
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {what}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mux-ray-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        with nodes(HEAD) as cluster:
            for host in (ONE, OTHER):
                cluster.add(host, 1)
            say("two nodes")
            with running(fleet_of_two(Path(directory), cluster.address), seconds=240) as fleet:
                say("a fleet of two units")
                # A unit answers before its engines are up.
                fleet.wait(lambda: len(engines_up(fleet)) == 4, 240, "up in both units")
                assert all(unit["remote"] for unit in units(fleet)), units(fleet)
                wanted = asyncio.run(streams(fleet))
                assert all(wanted)
                say("streams served over TCP")
                join(fleet, Path(directory))
                served = [unit["name"] for unit in units(fleet) if JOINS in str(unit)]
                assert served == ["u0"], units(fleet)
                say("a model has joined the unit of a node")

                streams_survive(fleet, cluster, ONE, wanted)
                say("a node killed, every stream complete and as before")
                if "--come-back" in sys.argv:
                    before = fleet.get("/fleet").json()["gateway"]["generation"]
                    cluster.add(THIRD, 1)
                    fleet.wait(lambda: all(unit["status"] == "up" for unit in units(fleet)), 240, "up again")
                    assert fleet.get("/fleet").json()["gateway"]["generation"] > before
                    say("the unit is up on another node")
                    fleet.wait(lambda: len(engines_up(fleet)) == 6, 240, "serving again in both units")
                    answer_of(fleet)
                    assert asyncio.run(streams(fleet, lambda: say(f"in flight: {in_flight(fleet)}"))) == wanted
                    say("served by both again")
                    command(fleet, "remove", JOINS)
                    assert asyncio.run(streams(fleet, lambda: command(fleet, "drain", "u0"))) == wanted
                    moved = [line for line in fleet.get("/metrics").text.splitlines() if "migrations_total{" in line]
                    assert [unit["name"] for unit in units(fleet)] == ["u1"]
                    say(f"u0 drained while it served: {moved}")


if __name__ == "__main__":
    main()
