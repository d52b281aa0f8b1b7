"""More models than memory: a fleet whose models do not fit together, under load, with sleeps, wakes and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import yaml

from muxserve.cluster.memory_use import memory_of
from tests.e2e.fleet import Fleet, running
from tests.support.patience import PATIENCE
from tests.support.promql import unanswered
from tests.support.tiny_checkpoint import tiny_checkpoint

NAMES = [f"m{number}" for number in range(5)]
# Two or three of the five have room beside what every fleet takes.
LIMIT = 1600 << 20
PROMPT = "More models than memory"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("residency")
    declared = {
        "memory": {"limit": LIMIT, "min_residence": "200ms"},
        "kv_pool": {"size": "32MiB"},
        "models": [
            {
                "name": name,
                "path": str(tiny_checkpoint(seed=number)),
                "dtype": "float32",
                "max_len": 256,
                "limits": {"max_wait": "none"},
                "replicas": {"max": 1, "wake": 4 * PATIENCE},
            }
            for number, name in enumerate(NAMES)
        ],
    }
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(declared))
    # What it has in memory is its own, as where one imports vLLM for itself.
    with running(file) as deployed:
        yield deployed


def memory(fleet: Fleet) -> dict[str, Any]:
    told: dict[str, Any] = fleet.get("/fleet").json()["memory"]
    return told


def total(fleet: Fleet, key: str) -> int:
    return sum(model[key] for model in memory(fleet)["models"].values())


async def answers(fleet: Fleet, rounds: int = 1) -> list[tuple[str, str]]:
    """What the models say, all asked at once."""
    async with fleet.async_client() as client:

        async def ask(name: str) -> tuple[str, str]:
            text = ""
            stream = await client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": PROMPT}],
                max_tokens=8,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            return name, text

        return list(await asyncio.gather(*(ask(name) for _ in range(rounds) for name in NAMES)))


@pytest.fixture(scope="module")
def said(fleet: Fleet) -> dict[str, str]:
    """What each model says when it was woken for the first time."""
    return dict(asyncio.run(answers(fleet)))


def used(fleet: Fleet) -> int:
    return sum(memory_of(process.pid).pss for process in fleet.processes())


def test_tokens_are_the_same_through_sleeps_and_wakes_under_load(fleet: Fleet, said: dict[str, str]) -> None:
    for _ in range(2):
        for name, text in asyncio.run(answers(fleet, rounds=4)):
            assert text == said[name]
        # What is shared with processes of others counts for more when those end, until a model has left.
        fleet.wait(lambda: used(fleet) <= LIMIT, PATIENCE, "within the limit")
    fleet.wait(lambda: memory(fleet)["used_bytes"] <= LIMIT, PATIENCE, "within the limit by its own measure")
    told = memory(fleet)
    assert total(fleet, "evictions") > 0
    assert total(fleet, "refused") == 0
    assert all(model["wakes"] >= 1 for model in told["models"].values())
    assert not unanswered(fleet.get("/metrics").text, residency=True)


def parents(fleet: Fleet) -> list[psutil.Process]:
    """The processes that load models and fork engines."""
    return fleet.parts("muxserve model")


def test_a_model_that_is_killed_while_it_is_woken_answers_all_the_same(fleet: Fleet, said: dict[str, str]) -> None:
    known = {process.pid for process in parents(fleet)}

    async def load_and_kill() -> list[tuple[str, str]]:
        asked = asyncio.create_task(answers(fleet, rounds=2))
        while not asked.done():
            new = [process for process in await asyncio.to_thread(parents, fleet) if process.pid not in known]
            if new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    new[0].send_signal(signal.SIGKILL)
                break
            await asyncio.sleep(0.01)
        return await asked

    for name, text in asyncio.run(load_and_kill()):
        assert text == said[name]
    assert fleet.get("/health").status_code == 200


def test_memory_decides_and_says_so(fleet: Fleet) -> None:
    if not total(fleet, "evictions"):
        asyncio.run(answers(fleet))  # five models, and no room for all
    status = subprocess.run(
        [sys.executable, "-m", "muxserve.cli.app", "status", "--url", fleet.url], capture_output=True, text=True
    )
    assert status.returncode == 0, status.stderr
    assert "memory: " in status.stdout
    assert "put to sleep" in status.stdout
