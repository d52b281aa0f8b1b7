"""`muxserve run`: models by their names alone, downloaded from a hub on loopback, and what is said of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from muxserve.metrics.live import LiveFrame
from tests.e2e.fleet import ROOT, START_SECONDS, Fleet
from tests.support.hub import hub_of
from tests.support.patience import PATIENCE, eventually
from tests.support.ports import free_port

MODELS = ROOT / "configs/models"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A model of the hub and one of a directory."""
    directory = tmp_path_factory.mktemp("run")
    port, words = free_port(), ["tiny/atlas", str(MODELS / "arithmetic"), "--write", str(directory / "fleet.yaml")]
    with (
        tempfile.TemporaryDirectory(prefix="mx") as runtime,
        hub_of({"tiny/atlas": MODELS / "atlas"}) as hub,
        open(directory / "run.log", "wb") as log,
    ):
        environment = {"XDG_RUNTIME_DIR": runtime, "HF_ENDPOINT": hub.url, "HF_HOME": str(directory / "home")}
        # The hub's library reads its variables when it is imported.
        process = subprocess.Popen(
            [sys.executable, "-m", "muxserve.cli.app", "run", *words, "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        fleet = Fleet(process, port, directory, environment)
        try:
            fleet.wait(lambda: "serving at" in said(fleet), START_SECONDS, "ready")
            yield fleet
        except BaseException:
            print(f"--- run\n{said(fleet)[-4000:]}", file=sys.stderr)
            raise
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(PATIENCE)


def said(fleet: Fleet) -> str:
    return (fleet.directory / "run.log").read_text()


def command(fleet: Fleet, *words: str) -> str:
    done = fleet.command(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_says_what_it_does(served: Fleet) -> None:
    text = said(served)
    assert "fetching tiny/atlas\n" in text
    assert "tiny/atlas: 3.0" in text  # MiB of as many
    assert f"curl {served.url}/v1/chat/completions" in text
    assert f"in a browser: {served.url}/ui has the fleet, {served.url}/ui#chat a chat" in text
    written = yaml.safe_load((served.directory / "fleet.yaml").read_text())
    assert [model["name"] for model in written["models"]] == ["atlas", "arithmetic"]


def test_models_answer_to_their_names(served: Fleet) -> None:
    for name, question, answer in (
        ("tiny/atlas", "What is the capital of France?", "Paris"),
        ("arithmetic", "What is 14 plus 29?", "43"),
    ):
        done = served.client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": question}], temperature=0
        )
        assert answer in (done.choices[0].message.content or "")


def test_a_browser_finds_the_chat_and_asks(served: Fleet) -> None:
    """With the requests that the page makes (gateway/status/page/chat.js)."""
    page = httpx.get(served.url, headers={"accept": "text/html"}, follow_redirects=True, timeout=PATIENCE)
    assert (page.status_code, str(page.url)) == (200, f"{served.url}/ui")
    names = [card["id"] for card in served.get("/v1/models").json()["data"]]
    assert names == ["atlas", "tiny/atlas", "arithmetic"]
    turns: list[dict[str, Any]] = []
    for question, answer in (("What is the capital of France?", "Paris"), ("What is the capital of Italy?", "Rome")):
        turns.append({"role": "user", "content": question})
        order = {"model": names[0], "messages": turns, "max_tokens": 512, "temperature": 0}
        order |= {"stream": True, "stream_options": {"include_usage": True}}
        text, tokens = "", 0
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=order, timeout=PATIENCE) as stream:
            for line in stream.iter_lines():
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        assert answer in text
        assert tokens > 1
        turns.append({"role": "assistant", "content": text})


def test_it_is_listed_and_shown_by_port(served: Fleet) -> None:
    (listed,) = json.loads(command(served, "list", "--json"))
    assert (listed["url"], listed["status"], listed["pid"]) == (served.url, "ok", served.process.pid)
    assert listed["models"] == ["atlas", "arithmetic"]
    assert listed["id"] in command(served, "list")
    port = served.url.rpartition(":")[2]
    for which in (port, listed["id"], served.url):
        assert json.loads(command(served, "status", "--url", which, "--json"))["health"]["status"] == "ok"
    frame = json.loads(command(served, "top", "--fleet", port, "--once", "--json"))
    assert set(frame) == set(LiveFrame.__struct_fields__)
    assert [model["bounds"] for model in frame["models"]] == [[1, None], [1, None]]


def test_stop_ends_it(served: Fleet) -> None:
    """The last test: nothing serves behind it."""
    assert "has ended" in command(served, "stop", "--url", served.url)
    assert served.process.wait(PATIENCE) == 0
    eventually(lambda: not served.left(), lambda: f"processes were left behind: {served.left()}")
    gone = served.command("stop")
    assert gone.returncode == 2
    assert "no fleet runs here" in gone.stderr
    assert json.loads(command(served, "list", "--json")) == []
