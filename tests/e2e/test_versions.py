"""A checkpoint changes under its name while 32 streams are open: nothing is lost, and nobody is told that there is no
such model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from muxserve.gateway.routing.model_names import pick
from tests.e2e.fleet import Fleet, running
from tests.e2e.load import greedy, stream_chat, until
from tests.e2e.several import command, units
from tests.support import preloaded
from tests.support.patience import PATIENCE
from tests.support.thoroughness import cases
from tests.support.tiny_checkpoint import tiny_checkpoint

CHECKPOINTS = [tiny_checkpoint(seed=seed) for seed in (0, 1)]
# Where requests ask for the model: its name, its alias, and a name that it could share.
NAMES = ["chat", "org/chat", "front"]
STREAMS = 32
LONG = greedy("A checkpoint changes", 160)


def declared(*checkpoints: Path, memory: bool = False, **more: Any) -> dict[str, Any]:
    """A fleet file in which model `chat` has the first of these checkpoints, and `other` the second."""
    models = [
        {
            "name": name,
            "path": str(checkpoint),
            "dtype": "float32",
            "max_len": 256,
            "limits": {"max_wait": "none"},
            **({"aliases": ["org/chat"]} if name == "chat" else {}),
            **({"replicas": {"max": 1, "wake": 4 * PATIENCE}} if memory else {}),
        }
        for name, checkpoint in zip(("chat", "other"), checkpoints, strict=True)
    ]
    section = {"memory": {"limit": 2500 << 20, "min_residence": "200ms"}} if memory else {}
    gateway = {"count": 2, "access_log": True}
    return {
        **section,
        "kv_pool": {"size": "64MiB"},
        "gateway": gateway,
        "aliases": {"front": "chat"},
        "models": models,
        **more,
    }


@pytest.fixture(
    scope="module", params=cases([False, True], [False]), ids=lambda memory: "memory" if memory else "plain"
)
def memory(request: pytest.FixtureRequest) -> bool:
    """Whether memory decides which models are awake."""
    return bool(request.param)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, memory: bool) -> Iterator[Fleet]:
    path = tmp_path_factory.mktemp("versions") / "fleet.yaml"
    path.write_text(yaml.safe_dump(declared(*CHECKPOINTS, memory=memory)))
    with running(path, start=preloaded.start) as deployed:
        yield deployed


@pytest.fixture(scope="module")
def said(fleet: Fleet) -> list[str]:
    """What each checkpoint answers."""

    async def ask() -> list[str]:
        async with fleet.async_client() as client:
            return [(await stream_chat(client, name, LONG))["text"] for name in ("chat", "other")]

    texts = asyncio.run(ask())
    assert len(set(texts)) == len(texts)
    return texts


class Streams:
    """`STREAMS` requests at a time, without end, under all names of the model; any that fails is raised at the end."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stop = asyncio.Event()
        # The generation of questions: after a change they are others.
        self.generation = 0
        self._tasks: list[asyncio.Task[None]] = []
        # By stream: when it began, and its answer.
        self.answers: list[list[tuple[int, str]]] = [[] for _ in range(STREAMS)]

    async def keep_asking(self, number: int, client: openai.AsyncOpenAI) -> None:
        while not self._stop.is_set():
            generation = self.generation
            answer = await stream_chat(client, NAMES[number % len(NAMES)], LONG)
            self.answers[number].append((generation, answer["text"]))

    def in_service(self) -> int:
        """The requests that units have, of all models."""
        states = [state["models"].values() for state in units(self._fleet).values() if state]
        places = ("queued", "prefilling", "handed", "decoding")
        return sum(model[place] for models in states for model in models for place in places)

    def asked(self, generation: int) -> bool:
        """Whether each stream has been answered to a question of that generation; what fails is raised at once."""
        for task in self._tasks:
            if task.done():
                task.result()
        return all(any(asked == generation for asked, _ in answers) for answers in self.answers)

    @classmethod
    @asynccontextmanager
    async def open(cls, fleet: Fleet) -> AsyncIterator[Streams]:
        """While the block runs; those that are begun are waited for at its end."""
        streams = cls(fleet)
        async with fleet.async_client() as client:
            streams._tasks = [asyncio.create_task(streams.keep_asking(number, client)) for number in range(STREAMS)]
            try:
                yield streams
            finally:
                streams._stop.set()
                ended = await asyncio.gather(*streams._tasks, return_exceptions=True)
                assert [each for each in ended if each is not None] == []


def apply(fleet: Fleet, wanted: dict[str, Any], *options: str) -> tuple[int, str]:
    """Exit code and output of `muxserve apply`."""
    file = fleet.directory / "wanted.yaml"
    file.write_text(yaml.safe_dump(wanted))
    done = command(fleet, "apply", str(file), *options)
    return done.returncode, done.stdout + done.stderr


def served(fleet: Fleet) -> set[str]:
    return set(fleet.get("/health").json()["models"])


async def test_old_streams_end_on_the_old_checkpoint_and_new_ones_begin_on_the_new(
    fleet: Fleet, said: Sequence[str], memory: bool
) -> None:
    old, new = said
    wanted = declared(CHECKPOINTS[1], CHECKPOINTS[1], memory=memory)
    code, text = await asyncio.to_thread(apply, fleet, wanted, "--dry-run")
    assert code == 0, text
    assert "; loaded beside the version that serves" in text
    async with Streams.open(fleet) as streams:
        await until(lambda: streams.in_service() == STREAMS, "in service")
        code, text = await asyncio.to_thread(apply, fleet, wanted)
        assert code == 0, text
        assert "chat@2 has answered a request" in text
        streams.generation = 1
        await until(lambda: streams.asked(1), "asked anew")
    for answers in streams.answers:
        assert answers[0] == (0, old)
        assert {text for generation, text in answers if generation == 0} <= {old, new}
        assert {text for generation, text in answers if generation == 1} == {new}
    assert served(fleet) == {"chat@2", "other"}
    ids = [each.id for each in fleet.client.models.list()]
    assert ids == ["chat", "org/chat", "front", "other"]
    answered = [line for line in fleet.get("/metrics").text.splitlines() if line.startswith("muxserve_requests_total")]
    assert any('model_name="chat@2"' in line for line in answered)
    assert not any('model_name="chat"' in line for line in answered)
    assert fleet.get("/models/chat/metrics").text.count('model_name="chat@2"')


async def test_a_name_is_shared_and_given_back(fleet: Fleet, said: Sequence[str], memory: bool) -> None:
    """While streams ask under it, as another version comes under its own name."""
    shared = {"front": {"chat": 50, "other": 50}}
    first = declared(*CHECKPOINTS, memory=memory, aliases=shared)
    async with Streams.open(fleet) as streams:
        code, text = await asyncio.to_thread(apply, fleet, first)
        assert code == 0, text
        streams.generation = 1
        await until(lambda: streams.asked(1), "asked anew")
        for name in [f"request-{number}" for number in range(8)]:
            headers = {"x-request-id": name}
            async with fleet.async_client() as client:
                answer = await stream_chat(client, "front", {**LONG, "max_tokens": 8, "extra_headers": headers})
            model = pick(shared["front"], name)
            assert dict(zip(("chat", "other"), said, strict=True))[model].startswith(answer["text"])
        alone = declared(*CHECKPOINTS, memory=memory, aliases={"front": {"chat": 0, "other": 1}})
        code, text = await asyncio.to_thread(apply, fleet, alone)
        assert (code, text.splitlines()[-1]) == (0, "done: 2 changes made"), text
        streams.generation = 2
        await until(lambda: streams.asked(2), "asked anew")
    for number, answers in enumerate(streams.answers):
        shared_name = NAMES[number % len(NAMES)] == "front"
        assert {text for generation, text in answers if generation == 1} <= ({*said} if shared_name else {said[0]})
        assert {text for generation, text in answers if generation == 2} == {said[1] if shared_name else said[0]}


@pytest.mark.thorough
async def test_a_checkpoint_that_does_not_serve_leaves_the_old_one(
    fleet: Fleet, said: Sequence[str], memory: bool, tmp_path: Path
) -> None:
    before = served(fleet)
    broken = tmp_path / "broken"
    shutil.copytree(CHECKPOINTS[0], broken)
    # Its weights are of another shape, which nobody sees before an engine loads them.
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    wanted = declared(broken, CHECKPOINTS[1], memory=memory, aliases={"front": {"chat": 0, "other": 1}})
    async with Streams.open(fleet) as streams:
        code, text = await asyncio.to_thread(apply, fleet, wanted)
        assert code == 1, text
        streams.generation = 1
        await until(lambda: streams.asked(1), "asked anew")
    assert {text for answers in streams.answers[::3] for _, text in answers} == {said[0]}
    assert served(fleet) == before
