"""Four replicas of one model: a prompt that fits nowhere until others move, a death, a unit drained under load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.fleet import ROOT, START_SECONDS, Fleet, running
from tests.e2e.load import Load, until
from tests.e2e.several import busy_unit, command, kill_all, of_model, processes_of, units
from tests.support import preloaded
from tests.support.fresh_metrics import fresh_metrics

MODEL = "atlas"
FLEET = {
    "policy": "adbs",
    # 32 blocks of 64 tokens for each replica, and the null page.
    "kv_pool": {"size": "6272KiB"},
    "models": [
        {
            "name": MODEL,
            "path": str(ROOT / "configs/models" / MODEL),
            "dtype": "float32",
            "engines": "split",
            "replicas": 4,
            "max_len": 2048,
            "prefix_caching": False,
            "limits": {"max_wait": "none"},
        }
    ],
}
# Tokens of a prompt and its answer: two such requests fit into one replica until they end, so that one of them can move
# all that time.
FILLER, FILLING = 120, 850


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("replicas")
    path = directory / "fleet.yaml"
    path.write_text(yaml.safe_dump(FLEET))
    with running(path, start=preloaded.start) as deployed:
        yield deployed


def free_tokens(fleet: Fleet) -> dict[str, int]:
    model = next(m for m in fleet.get("/fleet").json()["models"] if m["name"] == MODEL)
    block_pages = model["layers"] * model["kv_heads"]
    free = {}
    for name, state in units(fleet).items():
        (pool,) = state["pools"].values()
        free[name] = (pool["free_pages"] + pool["cached_pages"]) // block_pages * model["block_tokens"]
    return free


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


@pytest.mark.thorough
async def test_a_long_prompt_gets_room_by_moving_others(fleet: Fleet) -> None:
    moved_before = sum(of_model(fleet, MODEL, "moved_out").values())
    await until(lambda: len(of_model(fleet, MODEL, "decoding")) == 4, "all there", START_SECONDS)
    # Where the fillers outran the prompt there was room without moves: that says nothing, and is tried again.
    outrun, texts = True, []
    for _attempt in range(10):
        outrun, texts = await long_prompt_beside_fillers(fleet)
        if not outrun:
            break
    assert not outrun, "it waited for another request's end"
    assert sum(of_model(fleet, MODEL, "moved_out").values()) > moved_before
    # What moved has the tokens of what did not.
    assert set(texts) == {"".join(await generate(fleet, FILLER, FILLING, 0))}


async def long_prompt_beside_fillers(fleet: Fleet) -> tuple[bool, list[str]]:
    """The same filler on each replica, then a prompt that fits beside none of them.

    Returns whether a filler had ended before the prompt's first token, and the fillers' texts.
    """
    done: list[int] = []

    async def filler(index: int) -> str:
        text = "".join(await generate(fleet, FILLER, FILLING, 0))
        done.append(index)
        return text

    # Each to the freest, which has none yet when the ones before are seen to decode.
    fillers: list[asyncio.Task[str]] = []
    for index in range(4):
        fillers.append(asyncio.create_task(filler(index)))
        await until(lambda n=index: sum(of_model(fleet, MODEL, "decoding").values()) + len(done) > n, "decoded")
    if done or [*of_model(fleet, MODEL, "decoding").values()] != [1] * 4:
        return True, await asyncio.gather(*fillers)
    free = await asyncio.to_thread(free_tokens, fleet)
    need = 2000
    if not all(tokens < need for tokens in free.values()):  # a filler has ended meanwhile
        return True, await asyncio.gather(*fillers)
    done_at_first_token: list[int] = []
    assert await generate(fleet, need, 4, 99, lambda: done_at_first_token.append(len(done)))
    return done_at_first_token != [0], await asyncio.gather(*fillers)


async def test_a_hung_engine_gets_no_work_and_loses_no_stream(fleet: Fleet, reference: dict[str, Any]) -> None:
    def counted() -> float:
        lines = fresh_metrics(lambda: fleet.get("/metrics").text).splitlines()
        return sum(float(line.split()[-1]) for line in lines if 'muxserve_hangs_total{kind="engine"}' in line)

    before = await asyncio.to_thread(counted)
    async with Load(fleet, reference, [MODEL], concurrency=16, each=False) as streams:
        struck = await busy_unit(streams, fleet, MODEL)
        stopped = units(fleet)[struck]["engines"][f"{MODEL}/decode"]["pid"]
        os.kill(stopped, signal.SIGSTOP)
        streams.enough()
        part = {"part": f"engine {MODEL}/decode", "unit": struck}

        def suspected() -> bool:
            return part in fleet.get("/health").json()["suspects"]

        metric = f'muxserve_suspect{{part="{part["part"]}",unit="{struck}"}} 1.0'
        await streams.until(suspected, "suspected")
        health = fleet.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "degraded"
        assert health.json()["models"][MODEL]["replicas"][struck] == "suspect"
        await until(lambda: metric in fleet.get("/metrics").text, "in the metrics")
        # What was begun before has ended elsewhere; nothing is on its way that may still come here.
        await until(lambda: in_unit(fleet, struck) == streams.open or not suspected(), "alone with its requests")
        begun = streams.open
        async with Load(fleet, reference, [MODEL], 16) as new:
            new.enough()
            count = begun
            while await asyncio.to_thread(suspected):
                assert count <= begun
                count = await asyncio.to_thread(in_unit, fleet, struck)
    assert not streams.wrong
    assert not new.wrong
    assert len(new.answers) == 16
    await until(lambda: fleet.get("/health").json()["status"] == "ok", "whole", START_SECONDS)
    assert units(fleet)[struck]["engines"][f"{MODEL}/decode"]["pid"] != stopped
    assert counted() > before
    await asyncio.to_thread(fleet.wait_pages_free)


def in_unit(fleet: Fleet, unit: str) -> int:
    """Requests of the model that are in a unit."""
    state = units(fleet)[unit]["models"][MODEL]
    return sum(state[place] for place in ("queued", "prefilling", "handed", "decoding"))


@pytest.mark.thorough
async def test_a_killed_replica_loses_no_stream(fleet: Fleet, reference: dict[str, Any]) -> None:
    async with Load(fleet, reference, [MODEL]) as streams:
        struck = await busy_unit(streams, fleet, MODEL)
        killed = await asyncio.to_thread(processes_of, fleet, struck)
        assert len(killed) >= 4, killed
        kill_all(killed)
    assert not streams.wrong
    # It comes back.
    await asyncio.to_thread(fleet.wait_healthy)
    there = {"u0", "u1", "u2", "u3"}
    await until(lambda: set(of_model(fleet, MODEL, "decoding")) == there, "all there", START_SECONDS)


async def test_a_unit_drained_under_load_fails_no_request(fleet: Fleet, reference: dict[str, Any]) -> None:
    async with Load(fleet, reference, [MODEL]) as busy:
        await busy.until(lambda: of_model(fleet, MODEL, "decoding").get("u2", 0) >= 2, "busy")
        done = await asyncio.to_thread(command, fleet, "drain", "u2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "u2" not in units(fleet)
    assert not busy.wrong
    # And back again.
    scaled = await asyncio.to_thread(command, fleet, "scale", f"{MODEL}=4")
    assert scaled.returncode == 0, scaled.stdout + scaled.stderr
    assert len(units(fleet)) == 4
