"""Models whose memory is in files while they sleep, and whose processes stay: a real fleet under load, and deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.fleet import Fleet, running
from tests.e2e.load import until
from tests.e2e.test_residency import LOADING, WARMING, StoppedWake, answers, declared_in, memory, total, used
from tests.support.patience import PATIENCE
from tests.support.thoroughness import THOROUGH, cases

NAMES = [f"m{number}" for number in range(9)]
LIMIT = 1640 << 20


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running(declared_in(tmp_path_factory.mktemp("hibernation"), NAMES, LIMIT, "auto")) as deployed:
        yield deployed


@pytest.fixture(scope="module")
def said(fleet: Fleet) -> dict[str, str]:
    """What each model says when it was woken for the first time."""
    return dict(asyncio.run(answers(fleet, names=NAMES)))


def hibernating(fleet: Fleet) -> dict[str, int]:
    """The models that sleep while a process has them, and that process."""
    models = memory(fleet)["models"]
    asleep = {name for name, model in models.items() if model["residence"] == "asleep"}
    found = {each.cmdline()[0].removeprefix(LOADING).strip(): each.pid for each in fleet.parts(LOADING)}
    return {name: pid for name, pid in found.items() if name in asleep}


async def until_some_hibernate(fleet: Fleet, said: dict[str, str]) -> dict[str, int]:
    """Ask one model after the other, until idle ones were put to sleep before anybody waited for their memory."""
    async with asyncio.timeout(2 * PATIENCE):
        while True:
            for name in NAMES:
                assert await answers(fleet, names=[name]) == [(name, said[name])]
                if found := await asyncio.to_thread(hibernating, fleet):
                    return found


def check(told: list[tuple[str, str]], said: dict[str, str]) -> None:
    assert {name for name, _ in told} == set(NAMES)
    for name, text in told:
        assert text == said[name]


@pytest.mark.thorough
def test_models_get_into_files_before_anybody_asks_for_them(fleet: Fleet) -> None:
    fleet.wait(lambda: all(each["wakes"] for each in memory(fleet)["models"].values()), 2 * PATIENCE, "all were awake")
    assert used(fleet) <= LIMIT
    fleet.wait(lambda: hibernating(fleet), PATIENCE, "asleep in files")
    assert total(fleet, "wakes") == len(NAMES)
    # Nobody waited for the memory of any.
    models = memory(fleet)["models"].values()
    assert sum(each["evictions_ahead"] for each in models) == sum(each["evictions"] for each in models)


@pytest.mark.thorough
async def test_a_model_wakes_in_the_process_that_has_it_and_says_the_same(fleet: Fleet, said: dict[str, str]) -> None:
    for _ in range(3 if THOROUGH else 1):
        for name, pid in (await until_some_hibernate(fleet, said)).items():
            assert await answers(fleet, names=[name]) == [(name, said[name])]
            assert pid in {each.pid for each in fleet.parts(LOADING)}


@pytest.mark.thorough
def test_tokens_are_the_same_through_sleeps_and_wakes_under_load(fleet: Fleet, said: dict[str, str]) -> None:
    for _ in range(2):
        check(asyncio.run(answers(fleet, rounds=2, names=NAMES)), said)
        fleet.wait(lambda: used(fleet) <= LIMIT, PATIENCE, "within the limit")
    assert total(fleet, "evictions") > 0
    assert total(fleet, "wakes") > len(NAMES)
    assert total(fleet, "failed_wakes") == total(fleet, "refused") == 0


@pytest.mark.thorough
async def test_processes_of_sleeping_models_may_be_killed(fleet: Fleet, said: dict[str, str]) -> None:
    for pid in (await until_some_hibernate(fleet, said)).values():
        os.kill(pid, signal.SIGKILL)
    check(await answers(fleet, names=NAMES), said)
    await until(lambda: fleet.get("/health").status_code == 200, "healthy")


@pytest.mark.thorough
@pytest.mark.parametrize("victim", cases(["the engine", "muxserve warm parent"], ["the engine"]))
async def test_whoever_is_killed_during_a_wake_everybody_is_answered(
    fleet: Fleet, said: dict[str, str], victim: str
) -> None:
    over = asyncio.Event()

    async def load() -> list[tuple[str, str]]:
        told = []
        while not over.is_set():
            told += await answers(fleet, names=NAMES)
        return told + await answers(fleet, names=NAMES)

    wake = await asyncio.to_thread(StoppedWake, fleet, WARMING)
    loading = asyncio.create_task(load())
    try:
        await until(wake.caught, "an engine stopped in a wake")
        assert wake.process is not None
        struck = wake.process if victim == "the engine" else await asyncio.to_thread(fleet.part, victim)
        assert struck is not None
        struck.kill()
    finally:
        over.set()
        if wake.process is not None and victim != "the engine":
            wake.process.resume()
        told = await loading
    check(told, said)
    await until(lambda: fleet.get("/health").status_code == 200, "healthy")
