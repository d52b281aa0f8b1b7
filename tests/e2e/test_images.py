"""A model that sees images in a fleet with others: the official client sends them, and what is answered is what stock
vLLM answers."""

from __future__ import annotations

import asyncio
import base64
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from tests.e2e.fleet import ROOT, Fleet
from tests.e2e.mixed_reference import CHATS, MAX_LEN, MAX_TOKENS, SEEING, messages, sampling
from tests.support.patience import PATIENCE
from tests.support.tiny_checkpoint import picture

MANY = 24


@pytest.fixture(scope="module")
def fleet(mixed: Fleet) -> Fleet:
    return mixed


@pytest.fixture(scope="module")
def expected(stock_of_mixed: dict[str, Any]) -> list[str]:
    """Stock vLLM's answers to the chats."""
    found: list[str] = stock_of_mixed[SEEING]["texts"]
    return found


def params(index: int) -> dict[str, Any]:
    return {"max_tokens": MAX_TOKENS, "extra_body": {"ignore_eos": True}, **sampling(index)}


def kept(fleet: Fleet) -> list[Path]:
    """Files of images that gateways keep at the moment."""
    return [*fleet.runtime.glob("**/images/gateway-*/*")]


@pytest.mark.serves("Idefics3 (with images)", "served")
def test_chats_with_the_official_client(fleet: Fleet, expected: list[str]) -> None:
    assert len(set(expected)) == len(expected)
    for index, answer in enumerate(expected):
        asked: Any = messages(index)
        made = fleet.client.chat.completions.create(model=SEEING, messages=asked, **params(index))
        assert made.choices[0].message.content == answer
    # Choices of one prompt bring the same image. The first has the seed itself.
    asked = messages(1)
    two = fleet.client.chat.completions.create(model=SEEING, messages=asked, n=2, **params(1))
    assert two.choices[0].message.content == expected[1]
    fleet.wait(lambda: not kept(fleet), PATIENCE, "without images that nobody needs")


@pytest.mark.thorough
def test_the_example_asks_about_a_file(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    picture(100, 80).save(file)
    line = [sys.executable, "examples/image_client.py", "--url", f"{fleet.url}/v1", "--model", SEEING, str(file)]
    subprocess.run(line, check=True, capture_output=True, timeout=2 * PATIENCE, cwd=ROOT)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([*line[:-1], __file__], check=True, capture_output=True, timeout=2 * PATIENCE, cwd=ROOT)


@pytest.mark.thorough
def test_responses(fleet: Fleet, expected: list[str]) -> None:
    (message,) = messages(0)
    url = message["content"][0]["image_url"]["url"]
    parts: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": CHATS[0][0]}]
    made = fleet.client.responses.create(
        model=SEEING,
        input=[{"role": "user", "content": parts}],
        max_output_tokens=MAX_TOKENS,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    assert made.output_text == expected[0]


@pytest.mark.thorough
def test_nothing_is_lost_when_engines_are_killed(fleet: Fleet, expected: list[str]) -> None:
    async def load() -> None:
        client = fleet.async_client()

        async def ask(number: int) -> tuple[int, str]:
            index = number % len(expected)
            said = ""
            asked: Any = messages(index)
            async for chunk in await client.chat.completions.create(
                model=SEEING, messages=asked, stream=True, **params(index)
            ):
                said += chunk.choices[0].delta.content or ""
                begun.set()
            return index, said

        begun = asyncio.Event()
        asked = [asyncio.ensure_future(ask(number)) for number in range(MANY)]
        await begun.wait()
        fleet.kill(f"{SEEING}/decode")
        fleet.kill(f"{SEEING}/prefill")
        for index, said in await asyncio.gather(*asked):
            assert said == expected[index]
        await client.close()

    asyncio.run(load())
    fleet.wait_healthy()
    fleet.wait_pages_free()
    fleet.wait(lambda: not kept(fleet), PATIENCE, "without images that nobody needs")


def ask(fleet: Fleet, *parts: dict[str, Any], path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    body = {"model": SEEING, "max_tokens": 4, "messages": [{"role": "user", "content": content}], **more}
    return httpx.post(f"{fleet.url}{path}", json=body, timeout=PATIENCE, verify=False)


def png(width: int, height: int) -> str:
    with io.BytesIO() as file:
        picture(width, height).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def data(encoded: str) -> dict[str, Any]:
    return image(f"data:image/png;base64,{encoded}")


def test_what_is_refused(fleet: Fleet) -> None:
    for words, parts, more in (
        ("fetches nothing", [image("http://127.0.0.1:9/x.png")], {}),
        ("fetches nothing", [image("file:///etc/hostname")], {}),
        ("fetches nothing", [image("data:text/plain;base64,AA==")], {}),
        ("fetches nothing", [{"image_url": "https://example.com/x.png"}], {}),
        ("no video", [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}], {}),
        ("no audio", [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}], {}),
        ("'uuid' is not served", [image(f"data:image/png;base64,{png(8, 8)}", uuid="mine")], {}),
        ("given by its `image_url`", [{"type": "image_embeds", "image_embeds": "AA=="}], {}),
        ("'mm_processor_kwargs' is not served", [data(png(8, 8))], {"mm_processor_kwargs": {"size": {}}}),
        ("At most 2 image", [data(png(8, 8))] * 3, {}),
        ("cannot be read", [data("AAAA")], {}),
        ("cannot be read", [data("%%%")], {}),
        ("cannot be read", [data(png(40, 30)[:400])], {}),
    ):
        answer = ask(fleet, *parts, **more)
        assert answer.status_code == 400, (words, answer.status_code, answer.text)
        assert words in answer.json()["error"]["message"], answer.text
    # A few bytes that would become many: more than are decoded here, and than Pillow opens.
    for size in ((5000, 4000), (20_000, 18_000)):
        with io.BytesIO() as file:
            Image.new("1", size).save(file, "PNG")
            bomb = base64.b64encode(file.getvalue()).decode()
        answer = ask(fleet, data(bomb))
        assert answer.status_code == 400, answer.text
        assert "cannot be read" in answer.json()["error"]["message"]
    # Longer than the model's longest sequence, which is known only when images are tokens.
    long = {"type": "text", "text": "x" * (MAX_LEN - 100)}
    answer = ask(fleet, data(png(100, 80)), data(png(60, 110)), long)
    assert answer.status_code == 400, answer.text
    assert str(MAX_LEN) in answer.json()["error"]["message"]
    other = {"model": "arithmetic", "messages": messages(0), "max_tokens": 4}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=other, timeout=PATIENCE, verify=False)
    assert "text only here" in answer.json()["error"]["message"]


@pytest.mark.thorough
def test_an_image_beside_its_own_token_in_the_text(fleet: Fleet) -> None:
    """A text that names the token of images takes nobody else's."""
    answer = ask(fleet, data(png(40, 30)), {"type": "text", "text": "<image> <image>"})
    assert answer.status_code in (200, 400), answer.text
    with pytest.raises(openai.BadRequestError):
        fleet.client.chat.completions.create(model=SEEING, messages=messages(0), max_tokens=100_000)  # type: ignore[arg-type]
