"""Prefill and decode in one engine: a model whose prefill rolls over its replicas, and one that is a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from muxserve.control.client import ControlClient, RunningFleet
from muxserve.control.messages import Done, DrainUnit
from tests.e2e.fleet import ROOT, START_SECONDS, Fleet, fleet_file, running
from tests.e2e.load import Load, ask_each, greedy, stream_chat, until
from tests.e2e.several import busy_unit, command, kill_all, of_model, processes_of, run_directory, units
from tests.support import preloaded
from tests.support.fresh_metrics import fresh_metrics
from tests.support.patience import PATIENCE
from tests.support.thoroughness import cases
from tests.support.tiny_checkpoint import tiny_checkpoint

MODEL = "arithmetic"
# More than one replica holds, and enough to see that all is well again.
COUNT, FEW = 48, 8
ALL = {f"u{n}": {f"{MODEL}/both"} for n in range(3)}


def engines(fleet: Fleet) -> dict[str, set[str]]:
    """The engines of each unit that is up."""
    states = units(fleet).items()
    return {name: {e for e, each in state["engines"].items() if each["up"]} for name, state in states if state}


def exported(fleet: Fleet, name: str) -> float:
    """The sum of a metric, as Prometheus would read it."""
    lines = fresh_metrics(lambda: fleet.get("/metrics").text).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.fixture(scope="module")
def rolling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    # One replica does not hold all of the load, so that it has to roll on.
    directory, source = tmp_path_factory.mktemp("rolling"), ROOT / "configs/rolling.yaml"
    path = fleet_file(directory, source=source, kv_pool={"size": "8MiB"})
    # Decodes move to replicas whose own are in time, also on a machine that has much else to do.
    fleet = yaml.safe_load(path.read_text())
    fleet["models"][0]["slo"]["tpot_ms"] = 2000
    path.write_text(yaml.safe_dump(fleet))
    with running(path, start=preloaded.start) as deployed:
        # It serves as soon as one replica does.
        deployed.wait(lambda: engines(deployed) == ALL, START_SECONDS, "up in all replicas")
        yield deployed


async def test_prefill_rolls_over_replicas(rolling: Fleet, reference: dict[str, Any]) -> None:
    assert not (await ask_each(rolling, reference, [MODEL], COUNT, COUNT)).wrong
    switches = of_model(rolling, MODEL, "phase_switches")
    assert sum(map(bool, switches.values())) > 1, f"only one replica has had requests: {switches}"
    # A request waits at most once for each time that it is prefilled.
    assert sum(switches.values()) <= COUNT + sum(of_model(rolling, MODEL, "returned").values())
    assert exported(rolling, "muxserve_phase_switches_total") == sum(switches.values())
    seconds = sum(of_model(rolling, MODEL, "phase_switch_seconds").values())
    assert exported(rolling, "muxserve_phase_switch_seconds_total") == pytest.approx(seconds)
    await asyncio.to_thread(rolling.wait_pages_free)


async def test_a_rolling_replica_that_is_killed_loses_no_request(rolling: Fleet, reference: dict[str, Any]) -> None:
    async with Load(rolling, reference, [MODEL], COUNT, COUNT) as streams:
        struck = await busy_unit(streams, rolling, MODEL)
        kill_all(await asyncio.to_thread(processes_of, rolling, struck))
    assert not streams.wrong
    await until(lambda: engines(rolling) == ALL, "back", START_SECONDS)
    assert not (await ask_each(rolling, reference, [MODEL], FEW)).wrong


@pytest.mark.thorough
async def test_the_ring_is_known_to_a_new_global_scheduler(rolling: Fleet, reference: dict[str, Any]) -> None:
    async with Load(rolling, reference, [MODEL]) as busy:
        await busy.until(lambda: sum(of_model(rolling, MODEL, "decoding").values()) >= 4, "busy")
        killed = rolling.kill("muxserve.global_scheduler.process")
    assert not busy.wrong
    scheduler = "muxserve.global_scheduler.process"
    await until(lambda: bool({process.pid for process in rolling.parts(scheduler)} - {killed}), "started again")
    await until(lambda: rolling.get("/health").json()["scheduler"] == "up", "there again")
    assert not (await ask_each(rolling, reference, [MODEL], FEW)).wrong


@pytest.mark.thorough
async def test_replicas_join_and_leave_the_ring_under_load(rolling: Fleet, reference: dict[str, Any]) -> None:
    async with Load(rolling, reference, [MODEL]) as busy:
        more = await asyncio.to_thread(command, rolling, "scale", f"{MODEL}=4")
        assert more.returncode == 0, more.stdout + more.stderr
        (new,) = set(units(rolling)) - {"u0", "u1", "u2"}
        await busy.until(lambda: of_model(rolling, MODEL, "decoding").get(new, 0) > 0, "used")
        fewer = await asyncio.to_thread(command, rolling, "scale", f"{MODEL}=3")
        assert fewer.returncode == 0, fewer.stdout + fewer.stderr
        assert len(units(rolling)) == 3
    assert not busy.wrong
    await asyncio.to_thread(rolling.wait_pages_free)


LONG = 400


async def long_answers(fleet: Fleet, number: int, enough: asyncio.Event) -> set[str]:
    """Answers to the same prompt that take seconds, one after the other."""
    texts = set()
    async with fleet.async_client() as client:
        while not enough.is_set():
            answer = await client.completions.create(
                model=MODEL, prompt=f"{number} + 30 =", max_tokens=LONG, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == LONG
            texts.add(answer.choices[0].text)
    return texts


def drain_busy(fleet: Fleet) -> str:
    """Drain a unit that decodes long answers, at once: while a command starts, all of them may end and the next ones
    go to others."""
    with ControlClient(RunningFleet(run_directory(fleet))) as client:
        leaving = ""

        def busy() -> bool:
            nonlocal leaving
            counts = of_model(fleet, MODEL, "decoding")
            leaving = max(counts, key=lambda name: counts[name])
            return counts[leaving] >= 3

        fleet.wait(busy, PATIENCE, "decoding 3 requests in a unit")
        done = client.do(DrainUnit(leaving), lambda _: None)
    assert isinstance(done, Done), done
    return leaving


async def test_decodes_of_a_drained_replica_move_within_the_ring(rolling: Fleet) -> None:
    enough = asyncio.Event()
    answers = [asyncio.create_task(long_answers(rolling, number, enough)) for number in range(9)]
    try:
        moved = False
        # Those that were seen may still have ended just then.
        while not moved:
            before = of_model(rolling, MODEL, "moved_in")
            leaving = await asyncio.to_thread(drain_busy, rolling)
            after = await asyncio.to_thread(of_model, rolling, MODEL, "moved_in")
            assert leaving not in after
            moved = any(count > before.get(name, 0) for name, count in after.items())
            again = await asyncio.to_thread(command, rolling, "scale", f"{MODEL}=3")
            assert again.returncode == 0, again.stdout + again.stderr
    finally:
        enough.set()
        texts = await asyncio.gather(*answers)
    # Some have moved, and most have not.
    assert all(len(each) == 1 for each in texts), texts
    await asyncio.to_thread(rolling.wait_pages_free)


@pytest.mark.thorough
async def test_models_with_states_roll(tmp_path: Path) -> None:
    """In pools that hold a few requests, chunk by chunk: the texts of those that were asked alone, also when a replica
    is killed."""
    model = {"path": str(tiny_checkpoint("granite_hybrid", layers=4)), "max_len": 512, "max_num_batched_tokens": 64}
    source = ROOT / "configs/rolling.yaml"
    path = fleet_file(tmp_path, model, source=source, kv_pool={"size": "4MiB"})
    questions = [f"{number}: where does the river end? " * 4 for number in range(12)]
    with running(path, start=preloaded.start) as fleet:
        async with fleet.async_client() as client:

            async def ask(question: str) -> str:
                return str((await stream_chat(client, MODEL, greedy(question, 60)))["text"])

            alone = [await ask(question) for question in questions]
            assert await asyncio.gather(*(ask(question) for question in questions)) == alone
            switches = of_model(fleet, MODEL, "phase_switches")
            assert sum(map(bool, switches.values())) > 1, f"only one replica has had requests: {switches}"
            again = asyncio.gather(*(ask(question) for question in 2 * questions))
            counts: dict[str, int] = {}

            def busy() -> bool:
                counts.update(of_model(fleet, MODEL, "decoding"))
                return max(counts.values()) > 0

            await until(busy, "decoding")
            struck = max(counts, key=counts.__getitem__)
            kill_all(await asyncio.to_thread(processes_of, fleet, struck))
            assert await again == 2 * alone
        await until(lambda: engines(fleet) == ALL, "back", START_SECONDS)
        await asyncio.to_thread(fleet.wait_pages_free)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    path = fleet_file(tmp_path_factory.mktemp("pipeline"), source=ROOT / "configs/pipeline.yaml")
    with running(path, start=preloaded.start) as deployed:
        yield deployed


def stages(fleet: Fleet) -> list[int]:
    """The processes that compute the stages."""
    return [process.pid for process in fleet.parts(f"worker {MODEL}/both")]


async def test_two_stages_answer_as_one_engine(pipeline: Fleet, reference: dict[str, Any]) -> None:
    assert engines(pipeline) == {"u0": {f"{MODEL}/both"}}
    assert len(await asyncio.to_thread(stages, pipeline)) == 2
    assert not (await ask_each(pipeline, reference, [MODEL], COUNT)).wrong
    (bubbles,) = of_model(pipeline, MODEL, "bubbles").values()
    assert len(bubbles) == 2
    assert all(seconds > 0 for seconds in bubbles), bubbles
    assert exported(pipeline, "muxserve_stage_bubble_seconds_total") >= sum(bubbles)
    await asyncio.to_thread(pipeline.wait_pages_free)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", cases([0, 1], [1]))
async def test_requests_survive_the_death_of_a_stage(pipeline: Fleet, reference: dict[str, Any], stage: int) -> None:
    before = await asyncio.to_thread(stages, pipeline)
    async with Load(pipeline, reference, [MODEL]) as busy:
        await busy.until(lambda: of_model(pipeline, MODEL, "decoding")["u0"] >= 4, "busy")
        pipeline.kill(f"worker {MODEL}/both", f"rank {stage}")
    assert not busy.wrong
    await asyncio.to_thread(pipeline.wait_healthy)
    await until(lambda: not set(before) & set(stages(pipeline)), "started again as a whole")
    await asyncio.to_thread(pipeline.wait_pages_free)
