"""More models than memory: a fleet whose models do not fit together, under load, with sleeps, wakes and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from muxserve.net.process_memory import memory_of
from tests.e2e.fleet import Fleet, running
from tests.e2e.load import greedy, stream_chat, until
from tests.e2e.several import command
from tests.support.fresh_metrics import fresh_metrics
from tests.support.patience import PATIENCE
from tests.support.promql import unanswered
from tests.support.thoroughness import cases
from tests.support.tiny_checkpoint import tiny_checkpoint

NAMES = [f"m{number}" for number in range(7)]
# Three to five of the seven have room beside what every fleet takes, by how much that is here.
LIMIT = 1500 << 20
PROMPT = "More models than memory"


def declared_in(directory: Path, names: Sequence[str]) -> Path:
    """The file of a fleet of these models, of which some have room."""
    declared = {
        "memory": {"limit": LIMIT, "min_residence": "200ms"},
        "kv_pool": {"size": "32MiB"},
        "models": [
            {
                "name": name,
                "path": str(tiny_checkpoint(seed=number)),
                "dtype": "float32",
                "max_len": 256,
                # Either shape sleeps and wakes.
                "engines": "one" if number % 2 else "split",
                "limits": {"max_wait": "none"},
                "replicas": {"max": 1, "wake": 4 * PATIENCE},
            }
            for number, name in enumerate(names)
        ],
    }
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(declared))
    return file


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    # What it has in memory is its own, as where one imports vLLM for itself.
    with running(declared_in(tmp_path_factory.mktemp("residency"), NAMES)) as deployed:
        yield deployed


def memory(fleet: Fleet) -> dict[str, Any]:
    told: dict[str, Any] = fleet.get("/fleet").json()["memory"]
    return told


def total(fleet: Fleet, key: str) -> int:
    return sum(model[key] for model in memory(fleet)["models"].values())


async def answers(fleet: Fleet, rounds: int = 1, names: Sequence[str] = NAMES) -> list[tuple[str, str]]:
    """What the models say, all asked at once."""
    async with fleet.async_client() as client:

        async def ask(name: str) -> tuple[str, str]:
            return name, (await stream_chat(client, name, greedy(PROMPT, 8)))["text"]

        return list(await asyncio.gather(*(ask(name) for _ in range(rounds) for name in names)))


@pytest.fixture(scope="module")
def said(fleet: Fleet) -> dict[str, str]:
    """What each model says when it was woken for the first time."""
    return dict(asyncio.run(answers(fleet)))


def used(fleet: Fleet) -> int:
    return sum(memory_of(process.pid).pss for process in fleet.processes())


@pytest.mark.thorough
def test_tokens_are_the_same_through_sleeps_and_wakes_under_load(fleet: Fleet, said: dict[str, str]) -> None:
    for _ in range(2):
        for name, text in asyncio.run(answers(fleet, rounds=2)):
            assert text == said[name]
        # What is shared with processes of others counts for more when those end, until a model has left.
        fleet.wait(lambda: used(fleet) <= LIMIT, PATIENCE, "within the limit")
    fleet.wait(lambda: memory(fleet)["used_bytes"] <= LIMIT, PATIENCE, "within the limit by its own measure")
    told = memory(fleet)
    assert total(fleet, "evictions") > 0
    assert total(fleet, "refused") == 0
    assert all(model["wakes"] >= 1 for model in told["models"].values())
    assert not unanswered(fresh_metrics(lambda: fleet.get("/metrics").text), residency=True)


def test_only_decoding_gives_way_to_wakes_and_prompts(fleet: Fleet, said: dict[str, str]) -> None:
    assert dict(asyncio.run(answers(fleet))) == said

    def nicer(*words: str) -> set[int]:
        gateway = fleet.part("muxserve gateway")
        assert gateway is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return {each.nice() - gateway.nice() for each in fleet.parts("muxserve engine", *words)}
        return set()  # one has been put to sleep meanwhile

    def is_nicer(phase: str, by: int) -> bool:
        # The first model has two engines. Others may have put it to sleep.
        asyncio.run(answers(fleet, names=NAMES[:1]))
        return nicer(phase) == {by}

    for phase, by in (("/prefill", 0), ("/decode", 10)):
        fleet.wait(lambda phase=phase, by=by: is_nicer(phase, by), PATIENCE, f"{phase} nicer by {by}")


# Where a wake is stopped: by which process, the moment that it is there.
LOADING, WARMING = "muxserve model", "muxserve engine"
ITSELF = "the process that was stopped"


class StoppedWake:
    """A model that is being woken, with `process` stopped: the one that loads its weights, before it has forked
    engines, or an engine before it is up."""

    def __init__(self, fleet: Fleet, phase: str) -> None:
        self._fleet, self._phase = fleet, phase
        self._known = {each.pid for each in fleet.parts(phase)}
        self.process: psutil.Process | None = None

    def caught(self) -> bool:
        """Whether one is stopped now; one that was found too late goes on."""
        there = self._fleet.parts(self._phase)
        for each in (each for each in there if each.pid not in self._known):
            self._known.add(each.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
                if self._early(each):
                    self.process = each
                    return True
                each.resume()
        return False

    def _early(self, process: psutil.Process) -> bool:
        if self._phase == LOADING:
            return not process.children()
        model = process.cmdline()[0].removeprefix(WARMING).split("/")[0].strip()
        return bool(memory(self._fleet)["models"][model]["residence"] == "waking")


VICTIMS = [
    (LOADING, ITSELF),
    (LOADING, "muxserve-memory-manager"),
    (LOADING, "muxserve.unit.scheduler"),
    (LOADING, "muxserve warm parent"),
    (WARMING, ITSELF),
    (WARMING, "muxserve.global_scheduler"),
    (WARMING, "muxserve-memory-manager"),
]


@pytest.mark.parametrize(("phase", "victim"), cases(VICTIMS, [VICTIMS[3], VICTIMS[5]]))
async def test_whoever_is_killed_during_a_wake_everybody_is_answered(
    fleet: Fleet, said: dict[str, str], phase: str, victim: str
) -> None:
    over = asyncio.Event()

    async def load() -> list[tuple[str, str]]:
        told = []
        while not over.is_set():  # until a wake was stopped
            told += await answers(fleet)
        return told + await answers(fleet)

    wake = await asyncio.to_thread(StoppedWake, fleet, phase)
    loading = asyncio.create_task(load())
    try:
        await until(wake.caught, f"stopped in a wake: {phase}")
        assert wake.process is not None
        struck = wake.process if victim == ITSELF else await asyncio.to_thread(fleet.part, victim)
        assert struck is not None
        struck.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            wake.process.resume()
    finally:
        over.set()
        told = await loading
    assert {name for name, _ in told} == set(NAMES)
    for name, text in told:
        assert text == said[name]
    await until(lambda: fleet.get("/health").status_code == 200, "healthy")


def test_models_come_and_go(fleet: Fleet, said: dict[str, str], tmp_path: Path) -> None:
    """One that was added is woken when somebody asks for it, also when the unit has been started again since."""
    declared = yaml.safe_load((declared_in(tmp_path, [*NAMES, "more"])).read_text())
    file = tmp_path / "more.yaml"
    file.write_text(yaml.safe_dump({"models": declared["models"][-1:]}))
    wanted = tmp_path / "wanted.yaml"
    wanted.write_text(yaml.safe_dump({**declared, "models": declared["models"][:-1]}))
    texts: list[str] = []
    for part in (None, "muxserve.unit.scheduler", "muxserve-memory-manager"):
        added = command(fleet, "add", str(file))
        assert added.returncode == 0, added.stderr
        assert memory(fleet)["models"]["more"]["residence"] == "asleep"
        if part is not None:
            fleet.kill(part)
        texts += [text for _, text in asyncio.run(answers(fleet, names=["more"]))]
        assert dict(asyncio.run(answers(fleet))) == said
        removed = command(fleet, *(["remove", "more"] if part is None else ["apply", str(wanted)]))
        assert removed.returncode == 0, removed.stderr
        assert set(memory(fleet)["models"]) == set(NAMES)
        assert not list(fleet.parts("muxserve engine", "more/"))
        with pytest.raises(openai.NotFoundError):
            asyncio.run(answers(fleet, names=["more"]))
    assert len(texts) == 3
    assert len(set(texts)) == 1


def test_memory_decides_and_says_so(fleet: Fleet) -> None:
    if not total(fleet, "evictions"):
        asyncio.run(answers(fleet))  # seven models, and no room for all
    status = fleet.command("status", "--url", fleet.url)
    assert status.returncode == 0, status.stderr
    assert "memory: " in status.stdout
    assert "put to sleep" in status.stdout


@pytest.mark.thorough
def test_nothing_is_imported_again_whoever_dies_that_imported_vllm(fleet: Fleet, said: dict[str, str]) -> None:
    """Another import would take the memory of several models. A spare one takes the place of what imported vLLM first;
    when both die at once, the unit's warm parent forks one. Grammar compilers are forked from spares of their own."""
    before = memory(fleet)["fixed_bytes"]
    for parts in (["muxserve vLLM parent"], ["muxserve spare vLLM", "muxserve vLLM parent"]) * 2:
        fleet.wait(lambda: fleet.part("muxserve spare vLLM") is not None, PATIENCE, "a spare one")
        killed = [fleet.kill(part) for part in parts]

        def replaced(killed: Sequence[int] = killed) -> bool:
            there = fleet.part("muxserve vLLM parent")
            return there is not None and there.pid not in killed

        fleet.wait(replaced, PATIENCE, "another one in its place")
        # Its models' parent is forked by it: nothing is imported for that either.
        fleet.kill("muxserve warm parent")
        assert dict(asyncio.run(answers(fleet))) == said
    for number in range(6):
        there = {each.pid for each in fleet.parts("muxserve spare grammar compiler")}
        fleet.kill("muxserve spare grammar compiler")
        for each in fleet.parts("muxserve grammar compiler"):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        choice = fleet.client.completions.create(
            model=NAMES[0],
            prompt=PROMPT,
            max_tokens=8,
            extra_body={"structured_outputs": {"choice": ["yes", f"no {number}"]}},
        ).choices[0]
        assert choice.text in ("yes", f"no {number}")
        fleet.wait(
            lambda there=there: len({p.pid for p in fleet.parts("muxserve spare grammar compiler")} - there) == 1,
            PATIENCE,
            "another spare one",
        )
    assert (fleet.directory / "deploy.log").read_text().count("importing vLLM") == 1
    fleet.wait(lambda: memory(fleet)["fixed_bytes"] < before + (100 << 20), PATIENCE, "as large as before")


async def test_nothing_is_left_of_a_fleet_whose_controller_is_killed_during_a_wake(fleet: Fleet) -> None:
    wake = await asyncio.to_thread(StoppedWake, fleet, LOADING)
    asked = asyncio.create_task(answers(fleet))
    async with asyncio.timeout(2 * PATIENCE):
        while not await asyncio.to_thread(wake.caught):
            if asked.done():  # nobody had to be woken, or nobody was caught
                await asked
                asked = asyncio.create_task(answers(fleet))
    assert wake.process is not None
    fleet.process.send_signal(signal.SIGKILL)
    fleet.exit_code = -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        wake.process.resume()
    with pytest.raises(openai.OpenAIError):
        await asked
    await until(lambda: not fleet.left(), "ended")
