"""A gateway with keys and limits, and how it drains."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.playing import asking, play
from tests.gateway.rig import Rig, Running
from tests.gateway.unit_specs import fleet_of, model
from tests.support.patience import PATIENCE, eventually
from tests.support.ports import free_port
from tests.support.tiny_checkpoint import tiny_checkpoint


def test_keys(guarded: Running) -> None:
    with httpx.Client(base_url=guarded.url, timeout=PATIENCE) as http:
        for path in ("/health", "/metrics"):
            assert http.get(path).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}):
            for path in ("/fleet", "/v1/models", "/models/alpha/v1/models", "/nothing"):
                answer = http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "AuthenticationError"
        for headers in ({"Authorization": "Bearer first-key"}, {"X-Api-Key": "second-key"}):
            assert http.get("/fleet", headers=headers).status_code == 200
            assert http.get("/v1/models", headers=headers).status_code == 200
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="second-key", max_retries=0) as client:
        # One model only: its name may be left out.
        assert client.completions.create(model="alpha", prompt=play("open")).choices[0].text == "open"
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.completions.create(model="alpha", prompt=play("closed"))


def test_limits(guarded: Running) -> None:
    mark = guarded.mark()
    headers = {"Authorization": "Bearer first-key"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=PATIENCE) as http, ThreadPoolExecutor(2) as pool:

        def ask(say: str, **script: Any) -> httpx.Response:
            return http.post("/v1/completions", json={"prompt": play(say, **script)})

        def waiting() -> int:
            count = http.get("/fleet").json()["models"][0]["gateway"]["waiting"]
            assert isinstance(count, int)
            return count

        first = pool.submit(ask, "first", hold=2)
        guarded.wait("held", mark)
        second = pool.submit(ask, "second")
        eventually(lambda: waiting() > 0, "a request waits")
        third = ask("third")
        assert third.status_code == 429
        assert third.json()["error"]["type"] == "RateLimitError"
        assert int(third.headers["retry-after"]) >= 1
        # What needs no engine is not held up.
        assert http.post("/tokenize", json={"prompt": "abc"}).status_code == 200
        assert len(guarded.events(mark, "submit")) == 1
        guarded.tell_unit("go")
        assert first.result(PATIENCE).json()["choices"][0]["text"] == "first"
        assert second.result(PATIENCE).json()["choices"][0]["text"] == "second"


def test_a_client_that_leaves_the_queue_never_enters(guarded: Running) -> None:
    mark = guarded.mark()
    headers = {"Authorization": "Bearer first-key"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=PATIENCE) as http, ThreadPoolExecutor(1) as pool:
        first = pool.submit(http.post, "/v1/completions", json={"prompt": play("stays", hold=2)})
        guarded.wait("held", mark)

        def waiting() -> int:
            return int(http.get("/fleet").json()["models"][0]["gateway"]["waiting"])

        with asking(guarded, {"prompt": play("leaves")}, **headers):
            eventually(lambda: waiting() == 1, "in the queue")
        eventually(lambda: waiting() == 0, "out of the queue")
        guarded.tell_unit("go")
        assert first.result(PATIENCE).json()["choices"][0]["text"] == "stays"
    assert [e["script"]["say"] for e in guarded.events(mark, "submit")] == ["stays"]


@pytest.fixture
def leaving(rig: Rig, gateway: Running) -> Running:
    """One that may end. Started after `gateway`."""
    directory = rig.directory / "leaving"
    directory.mkdir()
    models = [model("alpha", tiny_checkpoint())]
    running = rig.start(fleet_of(directory, models, unit="leaving", port=free_port(), api_keys=["first-key"]))
    running.engines()
    return running


def test_draining_lets_running_requests_finish(leaving: Running) -> None:
    mark = leaving.mark()
    headers = {"Authorization": "Bearer first-key"}
    got: list[str] = []
    begun = threading.Event()

    def stream() -> None:
        body = {"prompt": play("to the end", hold=4), "stream": True}
        with httpx.stream(
            "POST", f"{leaving.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE
        ) as answer:
            for line in answer.iter_lines():
                begun.set()
                if line.startswith("data: {"):
                    got.append(json.loads(line[6:])["choices"][0]["text"])

    with httpx.Client(base_url=leaving.url, headers=headers, timeout=PATIENCE) as http, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream)
        leaving.wait("held", mark)
        begun.wait(PATIENCE)
        leaving.terminate()
        while (answer := http.get("/health")).status_code == 200:
            pass
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        answer = http.post("/v1/completions", json={"prompt": play("too late")})
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        leaving.tell_unit("go")
        running.result(PATIENCE)
    assert "".join(got) == "to the end"
    assert leaving.exit_status() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{leaving.url}/health")
