"""Busy models that do not fit together take turns: whatever is switched or killed, answers have the same tokens."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.fleet import Fleet, running
from tests.e2e.load import greedy, stream_chat, until
from tests.support.patience import PATIENCE
from tests.support.tiny_checkpoint import tiny_checkpoint

NAMES = ["m0", "m1", "m2"]
ONE_ENGINE = "m1"
# One or two of the three have room beside what every fleet takes, by how much of that counts as shared with others that
# run here.
LIMIT = 1730 << 20
# For that long a token lasts: turns are worth their while on a slow machine, too.
TPOT_MS = 30_000
PROMPTS = ["Each has its turn", "Then the others have theirs"]
# An answer takes longer than a turn.
TOKENS = 120
SWITCHES = 10
# As much of an answer as tells that a model answers as before.
BEGINNING = 60
Answers = dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("turns")
    declared = {
        "memory": {"limit": LIMIT, "min_residence": "200ms", "turns": True},
        "kv_pool": {"size": "64MiB"},
        "models": [
            {
                "name": name,
                "path": str(tiny_checkpoint(layers=8, heads=16, kv_heads=4, max_len=512, seed=number)),
                "dtype": "float32",
                # Either shape takes turns.
                "engines": "one" if name == ONE_ENGINE else "split",
                "max_len": 512,
                "limits": {"max_wait": "none"},
                "slo": {"ttft_ms": 1000 * PATIENCE, "tpot_ms": TPOT_MS},
                "replicas": {"max": 1, "wake": 8 * PATIENCE},
            }
            for number, name in enumerate(NAMES)
        ],
    }
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(declared))
    with running(file) as deployed:
        yield deployed


def memory(fleet: Fleet) -> dict[str, Any]:
    told: dict[str, Any] = fleet.get("/fleet").json()["memory"]
    return told


def turns(fleet: Fleet) -> dict[str, Any]:
    told: dict[str, Any] = memory(fleet)["turns"]
    return told


async def answers(fleet: Fleet, names: list[str], tokens: int = TOKENS) -> Answers:
    """What models say to all prompts, all asked at once."""
    async with fleet.async_client() as client:

        async def ask(name: str, prompt: str) -> str:
            text: str = (await stream_chat(client, name, greedy(prompt, tokens)))["text"]
            return text

        asked = list(itertools.product(names, PROMPTS))
        return dict(zip(asked, await asyncio.gather(*(ask(*each) for each in asked)), strict=True))


@pytest.fixture(scope="module")
def said(fleet: Fleet) -> Answers:
    """What each model says when nobody else is asked."""
    told: Answers = {}
    for name in NAMES:
        told |= asyncio.run(answers(fleet, [name]))
    assert turns(fleet)["ended"] == 0
    return told


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # ten turns are as long as this machine makes them
async def test_answers_are_the_same_through_ten_turns(fleet: Fleet, said: Answers) -> None:
    seen: list[dict[str, Any]] = []
    while (await asyncio.to_thread(turns, fleet))["ended"] < SWITCHES:
        load = asyncio.create_task(answers(fleet, NAMES))
        while not load.done():
            seen.append(await asyncio.to_thread(turns, fleet))
            await asyncio.wait([load], timeout=0.2)
        assert load.result() == said
    assert {name for told in seen for name in told["now"]} == set(NAMES)
    # Whoever has its turn has it for a while, and another one is next.
    busy = [told for told in seen if told["now"] and told["next"]]
    assert busy
    assert all(turn["length_seconds"] > 0.0 for told in busy for turn in told["now"].values())
    counted = sum(model["turns"] for model in memory(fleet)["models"].values())
    assert counted >= SWITCHES


ENGINE = "the engine that decodes of the model whose turn it is"


VICTIMS = [ENGINE, "muxserve.unit.scheduler", "muxserve-memory-manager", "muxserve.global_scheduler"]


@pytest.mark.thorough
async def test_whoever_is_killed_during_a_turn_answers_are_the_same(fleet: Fleet, said: Answers) -> None:
    """One after the other, under one load."""
    struck: list[str] = []

    async def load() -> None:
        while len(struck) < len(VICTIMS):
            assert await answers(fleet, NAMES) == said, f"after {struck} were killed"
        for asked, text in (await answers(fleet, NAMES, BEGINNING)).items():
            assert text
            # The last character may be of bytes that come later.
            assert said[asked].startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))

    def strike(victim: str) -> bool:
        # Its turn is over: it finishes a step, or has given its requests back and ends.
        told = memory(fleet)
        going = [
            name
            for name, model in told["models"].items()
            if model["residence"] == "leaving" and (model["waiting"] or name in told["turns"]["now"])
        ]
        phase = "both" if going[:1] == [ONE_ENGINE] else "decode"
        part = victim if victim != ENGINE else f"muxserve engine {going[0]}/{phase}" if going else ""
        found = next(iter(fleet.parts(part)), None) if going else None
        if found is not None:
            found.kill()
        return found is not None

    def struck_soon(victim: str) -> bool:
        """A model leaves within a tenth of a second: looked for often."""
        for _ in range(100):
            if strike(victim):
                return True
            time.sleep(0.01)
        return False

    loading = asyncio.create_task(load())
    try:
        for victim in VICTIMS:
            await until(functools.partial(struck_soon, victim), f"{victim} killed in a turn", 4 * PATIENCE)
            struck.append(victim)
            await until(lambda: fleet.get("/health").status_code == 200, "healthy")
    finally:
        struck[:] = VICTIMS
        await loading


@pytest.mark.thorough
def test_status_tells_whose_turn_it_is(fleet: Fleet) -> None:
    status = fleet.command("status", "--url", fleet.url)
    assert status.returncode == 0, status.stderr
    assert "turns: nobody; next: nobody; " in status.stdout
