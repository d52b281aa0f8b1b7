"""Tokens that are in a tokenizer, and that its model has no embedding of, never come to an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.rig import Rig, Running
from tests.gateway.unit_specs import fleet_of, model
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.tiny_checkpoint import byte_token, tiny_checkpoint

# Its tokenizer has 261 tokens, and this one is the last that the model knows.
LAST = 240
BEYOND = LAST + 1
# Three bytes in UTF-8.
WORD = next(chr(c) for c in range(0x800, 0xFFFF) if max(map(byte_token, chr(c).encode(errors="replace"))) > LAST)


@pytest.fixture(scope="module")
def http(rig: Rig, gateway: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    checkpoint = tmp_path_factory.mktemp("vocabulary") / "checkpoint"
    shutil.copytree(tiny_checkpoint(), checkpoint)
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": LAST + 1}))
    directory = Path(rig.directory / "vocabulary")
    directory.mkdir()
    running = rig.start(fleet_of(directory, [model("alpha", checkpoint)], unit="vocabulary", port=free_port()))
    running.engines()
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [9, BEYOND]}),
        ("/v1/completions", {"prompt": WORD}),
        ("/v1/completions", {"prompt": ["fine", WORD], "n": 2}),
        ("/v1/completions", {"prompt": "fine", "bad_words": [WORD]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORD}]}),
    ],
)
def test_they_are_refused(http: httpx.Client, path: str, body: dict[str, Any], stream: bool) -> None:
    answer = http.post(path, json={"model": "alpha", "max_tokens": 5, "stream": stream, **body})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "is in the tokenizer only: the model knows the tokens below 241" in message
    assert "bad_words" in message or "of the prompt, at " in message


def test_all_others_are_served(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "alpha", "prompt": [9, LAST], "max_tokens": 5})
    assert answer.status_code == 200, answer.text
