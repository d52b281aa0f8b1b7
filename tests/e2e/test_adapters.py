"""LoRA adapters: each answers under its name with stock vLLM's tokens, and comes and goes while the fleet serves."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.load import until
from tests.e2e.mixed_reference import ADAPTERS, GENERATING, MAX_TOKENS, PROMPTS, adapter, sampling
from tests.support.patience import eventually

# In the fleet from the start; the third is added to it.
AT_FIRST = ("one", "two")


@pytest.fixture(scope="module")
def fleet(mixed: Fleet) -> Fleet:
    return mixed


@pytest.fixture(scope="module")
def expected(stock_of_mixed: dict[str, Any]) -> dict[str, list[str]]:
    """Stock vLLM's texts of all prompts by adapter."""
    found: dict[str, list[str]] = stock_of_mixed[GENERATING]
    return found


async def answer(client: openai.AsyncOpenAI, name: str, index: int) -> str:
    """The text of a prompt with that adapter, or with none."""
    params: dict[str, Any] = sampling(index)
    made = await client.completions.create(
        model=name or GENERATING,
        prompt=PROMPTS[index],
        max_tokens=MAX_TOKENS,
        extra_body={"ignore_eos": True},
        **params,
    )
    assert made.model == (name or GENERATING)
    return made.choices[0].text


async def answers(fleet: Fleet, names: tuple[str, ...]) -> dict[str, list[str]]:
    """All prompts with each of these adapters, at once."""
    async with fleet.async_client() as client:
        texts = await asyncio.gather(*(answer(client, name, index) for index in range(len(PROMPTS)) for name in names))
    return {name: list(texts[number :: len(names)]) for number, name in enumerate(names)}


def test_tokens_are_those_of_stock_vllm_with_the_same_adapter(fleet: Fleet, expected: dict[str, list[str]]) -> None:
    names = ("", *AT_FIRST)
    # Otherwise nothing would be shown.
    assert len({tuple(expected[name]) for name in names}) == len(names)
    # Twice: the second time the prefixes are cached, those of each adapter apart.
    for _ in range(2):
        assert asyncio.run(answers(fleet, names)) == {name: expected[name] for name in names}
    fleet.wait_pages_free()


def test_adapters_are_listed_beside_their_model(fleet: Fleet) -> None:
    cards = {card.id: card for card in fleet.client.models.list()}
    assert {*AT_FIRST, GENERATING} <= set(cards)
    assert (cards["one"].model_extra or {})["parent"] == GENERATING
    assert fleet.client.models.retrieve("two").id == "two"


def test_a_killed_engine_loses_no_tokens(fleet: Fleet, expected: dict[str, list[str]]) -> None:
    async def load() -> None:
        begun = asyncio.Event()
        async with fleet.async_client() as client:

            async def ask(name: str, index: int) -> None:
                text = await answer(client, name, index)
                begun.set()
                assert text == expected[name][index], (name, index)

            asked = [asyncio.ensure_future(ask(n, i)) for i in range(len(PROMPTS)) for n in AT_FIRST for _ in range(5)]
            await begun.wait()
            fleet.kill(f"{GENERATING}/decode")
            await asyncio.gather(*asked)

    asyncio.run(load())
    fleet.wait_healthy()
    fleet.wait_pages_free()


def test_an_adapter_comes_and_goes_while_the_fleet_serves(fleet: Fleet, expected: dict[str, list[str]]) -> None:
    name = "three"
    assert name not in AT_FIRST
    assert name in ADAPTERS

    async def change() -> None:
        async with fleet.async_client() as client:
            before = asyncio.ensure_future(answers(fleet, AT_FIRST))
            done = await asyncio.to_thread(fleet.command, "adapter", GENERATING, name, str(adapter(name)))
            assert done.returncode == 0, done.stdout + done.stderr
            await until(lambda: name in {card.id for card in fleet.client.models.list()}, f"{name} served")
            assert await answers(fleet, (name,)) == {name: expected[name]}
            assert await before == {each: expected[each] for each in AT_FIRST}
            done = await asyncio.to_thread(fleet.command, "adapter", GENERATING, name)
            assert done.returncode == 0, done.stdout + done.stderr
            await until(lambda: name not in {card.id for card in fleet.client.models.list()}, f"{name} gone")
            with pytest.raises(openai.NotFoundError, match="'three' does not exist"):
                await answer(client, name, 0)

    asyncio.run(change())


def test_files_overwritten_in_place_are_served_and_find_no_prefix_of_before(
    fleet: Fleet, expected: dict[str, list[str]], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(adapter("three"), tmp_path / "four"))
    done = fleet.command("adapter", GENERATING, "four", str(directory))
    assert done.returncode == 0, done.stdout + done.stderr
    eventually(lambda: "four" in {card.id for card in fleet.client.models.list()}, "four served")
    # Twice: the second time with cached prefixes.
    for _ in range(2):
        assert asyncio.run(answers(fleet, ("four",))) == {"four": expected["three"]}
    for file in adapter("one").iterdir():
        shutil.copyfile(file, directory / file.name)
    for _ in range(2):
        assert asyncio.run(answers(fleet, ("four",))) == {"four": expected["one"]}
    done = fleet.command("adapter", GENERATING, "four")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_cannot_be_an_adapter_is_refused_in_words(fleet: Fleet) -> None:
    for code, words, reason in (
        (2, (GENERATING, "four", "/nowhere"), "/nowhere has no adapter_config.json"),
        (1, ("encoder", "four", str(adapter("three"))), "were started without room for adapters"),
        (2, (GENERATING, "four"), "has no adapter four"),
    ):
        refused = fleet.command("adapter", *words)
        assert refused.returncode == code
        assert reason in " ".join(refused.stderr.split()), refused.stderr
