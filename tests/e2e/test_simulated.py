"""`muxserve deploy --simulated`: everything but the models is real."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from muxserve.costs.measured import ideal_seconds
from muxserve.costs.profile import load_profile
from tests.e2e.fleet import QUICKSTART, Fleet, fleet_file, running
from tests.e2e.mixed_reference import (
    CHUNK,
    DOCUMENTS,
    GENERATING,
    KINDS,
    MAX_LEN,
    OPTIONS,
    QUERY,
    SEEING,
    TEXTS,
    adapter,
    checkpoint,
    messages,
)
from tests.support import preloaded
from tests.support.fresh_metrics import fresh_metrics
from tests.support.patience import PATIENCE, eventually
from tests.support.tiny_checkpoint import WINDOW, Kind, tiny_checkpoint
from tests.support.tiny_private import tiny_private

MODELS = ("atlas", "arithmetic")
# As in `muxserve.engine.simulated`: importing it would import vLLM here, too.
ANSWER_TOKENS = 128


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("simulated")
    changes: dict[str, dict[str, Any]] = {}
    for name in MODELS:
        source = QUICKSTART.parent / "models" / name
        shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("*.safetensors"))
        changes[name] = {"path": str(directory / name), "engine_args": {"load_format": "dummy"}}
    path = fleet_file(directory, changes_of=changes, without=["frontdesk"])
    with running(path, start=preloaded.start, options=("--simulated",)) as deployed:
        yield deployed


def test_answers_have_the_length_that_was_asked_for_and_end_otherwise(fleet: Fleet) -> None:
    for model in MODELS:
        ask: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "How are you?"}]}
        short = fleet.client.chat.completions.create(**ask, max_tokens=7)
        assert (short.choices[0].finish_reason, short.usage and short.usage.completion_tokens) == ("length", 7)
        whole = fleet.client.chat.completions.create(**ask)
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == ANSWER_TOKENS + 1
        assert whole.choices[0].message.content
    fleet.wait_pages_free()


def test_gauges_count_what_runs_and_are_zero_after_it(fleet: Fleet) -> None:
    """Autoscalers read them: stock vLLM says 0 as soon as a burst is over."""

    def gauges(path: str) -> tuple[float, float]:
        lines = fleet.get(path).text.splitlines()
        names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
        wanted = [f'{name}{{model_name="atlas"}} ' for name in names]
        running, usage = (float(line.rsplit(" ", 1)[1]) for start in wanted for line in lines if line.startswith(start))
        return running, usage

    ask: dict[str, Any] = {"model": "atlas", "prompt": "a b c", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    paths = ("/models/atlas/metrics", "/metrics")
    streams = [fleet.client.completions.create(**ask, stream=True) for _ in range(2)]
    try:
        for path in paths:
            eventually(lambda at=path: gauges(at)[0] == 2 and gauges(at)[1] > 0, f"two requests in {path}")
    finally:
        for stream in streams:
            stream.close()
    for path in paths:
        eventually(lambda at=path: gauges(at) == (0.0, 0.0), f"nothing runs in {path}")
    fleet.wait_pages_free()


def test_what_steps_took_becomes_a_profile_that_plans_read(fleet: Fleet) -> None:
    """Engines take the time of the roofline, by which the fleet predicts as well, and sleep a little too long."""
    learnt = fleet.directory / "learnt.json"
    for _ in range(5):
        for model in MODELS:
            fleet.client.completions.create(model=model, prompt="a b c", max_tokens=40, extra_body={"ignore_eos": True})
    shown = fleet.command("status", "--url", fleet.url).stdout
    assert all(f"{model}: steps over predicted: prefill " in shown for model in MODELS), shown
    metrics = fresh_metrics(lambda: fleet.get("/metrics").text)
    assert 'muxserve_step_cost_ratio{model_name="atlas",phase="decode",unit="u0"}' in metrics
    written = fleet.command("profile", "--from-fleet", "--url", fleet.url, "-o", str(learnt))
    assert written.returncode == 0, written.stderr
    profile = load_profile(learnt)
    assert sorted({engine.model for engine in profile.engines}) == sorted(MODELS)
    for engine in profile.engines:
        assert min(cell.samples for cell in [*engine.prefill, *engine.decode]) > 0
        cell = next(each for each in engine.decode if each.place == (1, 64))
        # How much too long depends on the machine; too short it cannot be.
        assert cell.seconds > 0.9 * ideal_seconds(engine, "decode", cell.place)
    assert 0.0 < profile.overheads["CPU"].request < PATIENCE
    made = fleet.command("plan", str(fleet.directory / "fleet.yaml"), "--costs", str(learnt), "--json")
    assert made.returncode == 0, made.stderr
    plan = json.loads(made.stdout)
    assert str(learnt) in plan["costs"]
    assert {model["model"] for unit in plan["units"] for model in unit["models"]} == set(MODELS)


def test_structured_output_is_kept_to(fleet: Fleet) -> None:
    schema = {"enum": ["yes", "no"]}
    answer = fleet.client.chat.completions.create(
        model="atlas",
        messages=[{"role": "user", "content": "Is it?"}],
        max_tokens=20,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "") in ("yes", "no")


def test_a_death_costs_no_token(fleet: Fleet) -> None:
    stream = fleet.client.completions.create(
        model="atlas", prompt="a", max_tokens=400, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = iter(stream)
    next(chunks)
    fleet.kill("engine atlas/decode")
    last = [*chunks][-1]
    assert last.usage is not None
    assert last.usage.completion_tokens == 400
    fleet.wait_healthy(PATIENCE)


@pytest.mark.thorough
def test_private_caches(tmp_path: Path) -> None:
    """Beside a model on the pool: K and V, states alone, and prompts alone, each in a cache of its own."""
    atlas = {"path": str(QUICKSTART.parent / "models" / "atlas"), "max_len": 512, "kv": "private"}
    own = {
        "private": atlas,
        "vectors": {**atlas, "engine_args": {"runner": "pooling"}},
        "states": {"path": str(tiny_private("mamba2")), "max_len": 512},
    }
    pooled = {**atlas, "name": "pooled", "kv": "pool"}
    models = [pooled, *({**each, "name": name} for name, each in own.items())]
    path = fleet_file(tmp_path, models=models, kv_pool={"size": "32MiB"})
    with running(path, start=preloaded.start, options=("--simulated",)) as fleet:
        for model in ("pooled", "private", "states"):
            answer = fleet.client.completions.create(model=model, prompt="a b c", max_tokens=40)
            assert answer.choices[0].finish_reason == "length"
        assert fleet.client.embeddings.create(model="vectors", input="a b c").data[0].embedding
        with fleet.client.completions.create(
            model="private", prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            chunks = iter(stream)
            next(chunks)
            fleet.kill("engine private/both")
            assert [*chunks][-1].choices[0].finish_reason == "length"
        fleet.wait_healthy(PATIENCE)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A pipeline of two stages of two GPUs each, of which there is none."""
    directory = tmp_path_factory.mktemp("split")
    shutil.copytree(QUICKSTART.parent / "models" / "arithmetic", directory / "arithmetic")
    path = fleet_file(
        directory,
        {"path": str(directory / "arithmetic"), "engines": "one", "stages": 2, "dtype": "auto"},
        without=["atlas", "frontdesk"],
        cluster={"gpus": 4, "gpu_type": "A100-80GB"},
    )
    with running(path, start=preloaded.start, options=("--simulated",)) as deployed:
        yield deployed


async def test_a_pipeline_of_pretended_gpus(split: Fleet) -> None:
    """Several answers go through its stages at once, and have all their tokens when the engine dies half-way."""
    async with split.async_client() as client:

        async def answer(number: int, under_way: asyncio.Event) -> int:
            stream = await client.completions.create(
                model="arithmetic", prompt=f"{number} plus", max_tokens=300, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            last = None
            async for chunk in stream:
                last = chunk
                under_way.set()
            assert last is not None
            assert last.usage is not None
            return last.usage.completion_tokens

        for killed in (False, True):
            begun = [asyncio.Event() for _ in range(6)]
            answers = asyncio.gather(*(answer(number, each) for number, each in enumerate(begun)))
            for each in begun:
                await each.wait()
            if killed:
                await asyncio.to_thread(split.kill, "engine arithmetic/both")
            assert await answers == [300] * 6
    assert "arithmetic: stages in bubbles" in split.command("status", "--url", split.url).stdout
    await asyncio.to_thread(split.wait_healthy, PATIENCE)
    await asyncio.to_thread(split.wait_pages_free)


RESIDENT = tuple(f"m{number}" for number in range(5))


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Five models in the memory of two pretended GPUs, each of which has room for one of its models beside its pool."""
    directory = tmp_path_factory.mktemp("resident")
    path = fleet_file(directory, cluster={"gpus": 2, "gpu_type": "A100-80GB"}, memory={"limit": "5GiB", "turns": True})
    declared = yaml.safe_load(path.read_text())
    model = next(each for each in declared["models"] if each["name"] == "atlas")
    declared["models"] = [{**model, "name": name, "dtype": "auto"} for name in RESIDENT]
    path.write_text(yaml.safe_dump(declared))
    with running(path, start=preloaded.start, options=("--simulated",)) as deployed:
        yield deployed


async def test_models_share_the_memory_of_pretended_gpus(resident: Fleet) -> None:
    """All are asked at once, while an engine and then the global scheduler die. Everybody is answered, and each GPU has
    no more than its limit."""

    def memory() -> dict[str, Any]:
        told: dict[str, Any] = resident.get("/fleet").json()["memory"]
        for unit in told["units"].values():
            assert (unit["used_bytes"] or 0) <= unit["limit_bytes"] == 5 << 30
        return told

    units = {name: each["unit"] for name, each in memory()["models"].items()}
    assert sorted(units) == list(RESIDENT)
    assert set(units.values()) == {"u0", "u1"}
    async with resident.async_client() as client:
        for victim in ("engine", "muxserve.global_scheduler"):
            asked = [
                client.completions.create(model=name, prompt="a", max_tokens=30, extra_body={"ignore_eos": True})
                for name in RESIDENT
                for _ in range(4)
            ]
            answers = asyncio.gather(*asked)
            await asyncio.to_thread(resident.wait, lambda v=victim: resident.part(v) is not None, PATIENCE, victim)
            await asyncio.to_thread(resident.kill, victim)
            while not answers.done():
                await asyncio.wait([answers], timeout=0.2)
                await asyncio.to_thread(memory)
            assert [a.usage and a.usage.completion_tokens for a in await answers] == [30] * len(asked)
    awake = dict.fromkeys(units.values(), 0)
    for name, each in memory()["models"].items():
        awake[units[name]] += each["residence"] in ("awake", "waking")
        assert f"{name} is served by {units[name]}" in (resident.directory / "deploy.log").read_text()
    assert max(awake.values()) == 1


async def test_models_of_pretended_gpus_take_turns(resident: Fleet) -> None:
    """Each is busy all the time, so that others wait for it until its turn is over. All answers have all their
    tokens."""

    async def ask(name: str) -> None:
        async with resident.async_client() as client:
            for _ in range(8):
                answer = await client.completions.create(
                    model=name, prompt=name, max_tokens=450, extra_body={"ignore_eos": True}
                )
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 450

    await asyncio.gather(*(ask(name) for name in RESIDENT for _ in range(3)))
    memory = resident.get("/fleet").json()["memory"]
    ended = {name: each["turns"] for name, each in memory["models"].items()}
    assert sum(ended.values()) > 0
    assert sum(unit["turns"]["ended"] for unit in memory["units"].values()) == sum(ended.values())
    assert resident.get("/health").status_code == 200


def without_weights(directory: Path, name: str, source: Path, **engine_args: Any) -> dict[str, Any]:
    """A model of a fleet file, as the checkpoint is but for its weights."""
    shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("*.safetensors"))
    return {
        "name": name,
        "path": str(directory / name),
        "max_len": MAX_LEN,
        "max_num_batched_tokens": CHUNK,
        "dtype": "float32",
        "limits": {"max_wait": "none"},
        "engine_args": {"load_format": "dummy", **engine_args},
    }


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A model that generates, and those of `tests/e2e/test_pooling.py`, all without weights."""
    directory = tmp_path_factory.mktemp("pooling")
    models: list[dict[str, Any]] = []
    for name in (GENERATING, *KINDS):
        source = checkpoint(name) if name in KINDS else QUICKSTART.parent / "models" / name
        models.append(without_weights(directory, name, source, **OPTIONS.get(name, {})))
    path = fleet_file(directory, models=models)
    with running(path, start=preloaded.start, options=("--simulated",)) as deployed:
        yield deployed


def post(fleet: Fleet, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{fleet.url}{path}", json=body, timeout=PATIENCE, verify=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def shape(answer: Any) -> tuple[int, ...]:
    return (len(answer), *shape(answer[0])) if isinstance(answer, list) else ()


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["embedder", "encoder"])
def test_made_up_embeddings(pooling: Fleet, model: str) -> None:
    answer = pooling.client.embeddings.create(model=model, input=[*TEXTS, TEXTS[1]])
    found = [each.embedding for each in answer.data]
    assert found[1] == found[-1]
    assert len({tuple(each) for each in found}) == len(TEXTS)
    assert [math.fsum(number**2 for number in each) for each in found] == pytest.approx([1.0] * len(found), abs=1e-4)
    text = pooling.client.completions.create(model=GENERATING, prompt="1 +", max_tokens=5)
    assert text.usage is not None
    assert text.usage.completion_tokens == 5


@pytest.mark.thorough
@pytest.mark.parametrize("model", list(KINDS))
def test_made_up_vectors_are_shaped_like_those_of_vllm(
    pooling: Fleet, stock_of_mixed: dict[str, Any], model: str
) -> None:
    for text, stock in zip(TEXTS, stock_of_mixed[model]["data"], strict=True):
        assert shape(post(pooling, "/pooling", model=model, input=text)["data"][0]["data"]) == shape(stock)


@pytest.mark.thorough
def test_made_up_classes_scores_and_ranks(pooling: Fleet) -> None:
    for model, labels in (("judge", 3), ("reranker", 1)):
        (found,) = post(pooling, "/classify", model=model, input=TEXTS[1])["data"]
        assert len(found["probs"]) == labels
        assert all(0.0 < each < 1.0 for each in found["probs"])
    for model in ("embedder", "tokens", "encoder", "reranker"):
        scores = post(pooling, "/score", model=model, queries=QUERY, documents=DOCUMENTS)["data"]
        assert len(scores) == len(DOCUMENTS)
        ranked = post(pooling, "/rerank", model=model, query=QUERY, documents=DOCUMENTS)["results"]
        assert sorted(each["index"] for each in ranked) == list(range(len(DOCUMENTS)))
    pooling.wait_pages_free()


@pytest.mark.thorough
async def test_a_death_costs_no_vector(pooling: Fleet) -> None:
    async with pooling.async_client() as client:

        async def ask(number: int) -> list[float]:
            answer = await client.embeddings.create(model="embedder", input=TEXTS[number % len(TEXTS)])
            return answer.data[0].embedding

        before = [await ask(number) for number in range(len(TEXTS))]
        asked = [asyncio.ensure_future(ask(number)) for number in range(40)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(pooling.kill, "engine embedder/prefill")
        assert await asyncio.gather(*asked) == [before[number % len(TEXTS)] for number in range(40)]
    await asyncio.to_thread(pooling.wait_healthy, PATIENCE)
    await asyncio.to_thread(pooling.wait_pages_free)


OTHER_CACHES: dict[str, tuple[Kind, int]] = {
    "windowed": ("gemma3", 6),
    "latent": ("deepseek_v2", 2),
    "stateful": ("granite_hybrid", 4),
}


@pytest.fixture(scope="module")
def various(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Models with windows, latents, states, images and adapters, all without weights."""
    directory = tmp_path_factory.mktemp("various")
    models = [
        without_weights(directory, name, tiny_checkpoint(kind, layers=layers))
        for name, (kind, layers) in OTHER_CACHES.items()
    ]
    models.append(without_weights(directory, SEEING, tiny_checkpoint("idefics3"), limit_mm_per_prompt={"image": 2}))
    adapted = without_weights(directory, GENERATING, QUICKSTART.parent / "models" / GENERATING)
    models.append({**adapted, "adapters": {"one": str(adapter("one"))}})
    path = fleet_file(directory, models=[{**model, "engines": "split"} for model in models])
    with running(path, start=preloaded.start, options=("--simulated",)) as deployed:
        yield deployed


@pytest.mark.thorough
@pytest.mark.parametrize("model", list(OTHER_CACHES))
async def test_other_caches(various: Fleet, model: str) -> None:
    """Answers leave the window behind, and have all their tokens when the engine dies half-way."""
    async with various.async_client() as client:

        async def answer(begun: asyncio.Event) -> int:
            stream = await client.completions.create(
                model=model, prompt="a" * WINDOW, max_tokens=250, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            tokens = 0
            async for chunk in stream:
                begun.set()
                tokens = chunk.usage.completion_tokens if chunk.usage is not None else tokens
            return tokens

        begun = [asyncio.Event() for _ in range(4)]
        answers = asyncio.gather(*(answer(each) for each in begun))
        for each in begun:
            await each.wait()
        await asyncio.to_thread(various.kill, f"engine {model}/decode")
        assert await answers == [250] * 4
    await asyncio.to_thread(various.wait_healthy, PATIENCE)
    await asyncio.to_thread(various.wait_pages_free)


@pytest.mark.thorough
def test_images_and_adapters(various: Fleet) -> None:
    asked: Any = messages(1)
    seen = various.client.chat.completions.create(model=SEEING, messages=asked, max_tokens=7)
    plain = various.client.chat.completions.create(model=SEEING, messages=[asked[0] | {"content": "?"}], max_tokens=7)
    assert seen.usage is not None
    assert plain.usage is not None
    assert seen.usage.completion_tokens == 7
    assert seen.usage.prompt_tokens > plain.usage.prompt_tokens + 16
    for name in (GENERATING, "one"):
        text = various.client.completions.create(model=name, prompt="1 +", max_tokens=5)
        assert text.usage is not None
        assert text.usage.completion_tokens == 5
    various.wait_pages_free()
