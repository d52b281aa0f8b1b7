"""A fleet that is changed while it serves, by its user's commands and by itself."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.e2e.fleet import ROOT, Fleet, running
from tests.e2e.load import greedy, stream_chat, until
from tests.e2e.reference import requests_for
from tests.support import preloaded
from tests.support.patience import PATIENCE, eventually

MODELS = ROOT / "configs/models"
SLEEPS = {"dtype": "float32", "replicas": {"min": 0, "max": 2, "start": 0, "idle": "2s", "wake": "240s"}}
FLEET = {
    "kv_pool": {"size": "32MiB"},
    "gateway": {"count": 2},
    "models": [
        {"name": "arithmetic", "path": str(MODELS / "arithmetic"), "dtype": "float32"},
        {"name": "atlas", "path": str(MODELS / "atlas"), **SLEEPS},
        {"name": "nap", "path": str(MODELS / "frontdesk"), **SLEEPS},
    ],
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    path = tmp_path_factory.mktemp("changes") / "fleet.yaml"
    path.write_text(yaml.safe_dump(FLEET))
    # A place of its own for run directories: commands find the only fleet there.
    with tempfile.TemporaryDirectory(prefix="mx") as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        with running(path, start=preloaded.start) as deployed:
            yield deployed


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """A command as the fleet's user gives it."""
    line = [sys.executable, "-m", "muxserve.cli.app", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=4 * PATIENCE, cwd=ROOT, env=os.environ.copy())


def model(fleet: Fleet, name: str) -> dict[str, Any]:
    health: dict[str, Any] = fleet.get("/health").json()["models"][name]
    return health


def units(fleet: Fleet) -> dict[str, list[str]]:
    return {unit["name"]: unit["serves"] for unit in fleet.get("/fleet").json()["units"]}


def ask(fleet: Fleet, name: str, question: str) -> str:
    messages: Any = [{"role": "user", "content": question}]
    answer = fleet.client.chat.completions.create(model=name, messages=messages, max_tokens=16, temperature=0)
    return answer.choices[0].message.content or ""


def processes(fleet: Fleet) -> set[int]:
    return {process.pid for process, _ in fleet.commands()}


def engines(fleet: Fleet) -> set[int]:
    """Those of arithmetic, and the gateways."""
    return {process.pid for word in ("muxserve engine arithmetic", "muxserve gateway") for process in fleet.parts(word)}


def managers(fleet: Fleet) -> int:
    """How many memory managers there are."""
    return len(fleet.parts("muxserve-memory-manager"))


async def keep_asking(fleet: Fleet, stop: asyncio.Event) -> list[str]:
    """Answers to the same question, one after the other, until `stop`; any failure is raised."""
    client, answers = fleet.async_client(), []
    while not stop.is_set():
        answers.append((await stream_chat(client, "arithmetic", greedy("What is 14 plus 29?", 48)))["text"])
    return answers


async def a_conversation_stays(fleet: Fleet) -> None:
    """Both turns of a conversation go to one of the two replicas, the second although that one has more to do then: it
    has a stream, unless that has ended by then, and the other one is idle."""
    client, prompt = fleet.async_client(), [2 + 7 * n % 400 for n in range(300)]

    def counted(what: str) -> dict[str, int]:
        found = {unit["name"]: unit["state"] for unit in fleet.get("/fleet").json()["units"]}
        return {name: state["models"]["arithmetic"][what] for name, state in found.items()}

    def arrived() -> dict[str, int]:
        """As all gateways have it: any of them may answer, and not all are told at once."""
        while True:
            told = [counted("arrived") for _ in range(12)]
            if all(each == told[0] for each in told):
                return told[0]

    async def asked(**request: Any) -> tuple[str, Any]:
        """Which replica a request came to, and the answer."""
        before = await asyncio.to_thread(arrived)
        answer = await client.completions.create(model="arithmetic", temperature=0, **request)
        await until(lambda: sum(arrived().values()) > sum(before.values()), "told of")
        after = await asyncio.to_thread(arrived)
        (there,) = (name for name, count in after.items() if count > before[name])
        return there, answer

    await until(lambda: set(counted("decoding").values()) == {0}, "idle")
    there, _ = await asked(prompt=prompt[:260], max_tokens=1)
    long: Any = {"prompt": [5, 6, 7], "max_tokens": 1000, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [await asked(**long) for _ in range(2)]
    for name, stream in streams:
        if name != there:
            await stream.close()
    await until(lambda: all(not count for name, count in counted("decoding").items() if name != there), "one is idle")
    again, _ = await asked(prompt=prompt, max_tokens=1)
    assert again == there
    for _, stream in streams:
        await stream.close()


ASKING = 3


@pytest.mark.thorough
async def test_replicas_come_and_go_under_load(fleet: Fleet) -> None:
    answers: list[str] = []

    async def under_load(*words: str) -> subprocess.CompletedProcess[str]:
        stop = asyncio.Event()
        asking = [asyncio.create_task(keep_asking(fleet, stop)) for _ in range(ASKING)]
        done = await asyncio.to_thread(command, *words)
        stop.set()
        answers.extend(answer for each in await asyncio.gather(*asking) for answer in each)
        return done

    up = await under_load("scale", "arithmetic=2")
    assert up.returncode == 0, up.stderr
    assert up.stdout.splitlines()[-1] == "done: arithmetic has 2 replicas (u0 and u1)"
    assert await asyncio.to_thread(units, fleet) == {"u0": ["arithmetic"], "u1": ["arithmetic"]}
    await a_conversation_stays(fleet)
    down = await under_load("scale", "arithmetic=1", "--json")
    assert down.returncode == 0, down.stdout
    assert len(answers) >= 2 * ASKING
    assert len(set(answers)) == 1
    assert [served for served in units(fleet).values() if served] == [["arithmetic"]]


async def test_a_model_sleeps_until_somebody_asks(fleet: Fleet, reference: dict[str, Any]) -> None:
    def asleep() -> bool:
        """Units that serve nothing end, and their pools go."""
        return model(fleet, "atlas")["status"] == "asleep" and managers(fleet) == 1

    await until(asleep, "asleep")
    assert fleet.get("/health").json()["status"] == "ok"
    requests = requests_for("atlas")[:6]
    for _ in range(2):
        answers = await asyncio.gather(*(stream_chat(fleet.async_client(), "atlas", each) for each in requests))
        assert answers == reference["atlas"][:6]
        assert model(fleet, "nap")["status"] == "asleep"
        await until(asleep, "asleep again")


def taken_out(fleet: Fleet, name: str) -> None:
    """An earlier run of a test may have left the model, or have taken it out already."""
    if name in fleet.get("/health").json()["models"]:
        removed = command("remove", name)
        assert removed.returncode == 0, removed.stderr


def test_a_fleet_becomes_what_its_file_says(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """And at SIGHUP what the file says that it was deployed from."""
    taken_out(fleet, "frontdesk")
    monkeypatch.setenv("TEAM_KEYS", "of-the-team")
    more = {"name": "frontdesk", "path": str(MODELS / "frontdesk"), "dtype": "float32"}
    first = {**FLEET["models"][0], "limits": {"max_queue": 7}}  # type: ignore[index]
    wanted = {
        **FLEET,
        "tenants": {"team": {"keys": ["env:TEAM_KEYS"], "models": ["frontdesk"]}},
        "models": [first, *FLEET["models"][1:], more],  # type: ignore[index]
        "kv_pool": {"size": "48MiB"},
    }
    # Beside the fleet's own, as what tenants used is kept beside the file.
    file = fleet.directory / "wanted.yaml"
    file.write_text(yaml.safe_dump(wanted))
    planned = command("apply", str(file), "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "+ model frontdesk\n" in planned.stdout
    assert "~ models.arithmetic.limits.max_queue: 1024 -> 7\n" in planned.stdout
    assert "! kv_pool.size: 32 MiB -> 48 MiB; needs the fleet deployed again\n" in planned.stdout
    before = engines(fleet)
    assert before
    applied = command("apply", str(file))
    assert applied.returncode == 3, applied.stderr
    assert applied.stdout.splitlines()[-1] == "not done: 3 changes made; 1 change marked ! not made"
    # Nothing that ran was started anew.
    assert engines(fleet) == before
    # Any of the two gateways may answer.
    assert {fleet.get("/v1/models").status_code for _ in range(16)} == {401}
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="of-the-team", max_retries=0, timeout=PATIENCE) as team:
        assert [each.id for each in team.models.list()] == ["frontdesk"]
        messages: Any = [{"role": "user", "content": "When does the library open on Tuesday?"}]
        answer = team.chat.completions.create(model="frontdesk", messages=messages, max_tokens=16)
        assert answer.choices[0].message.content
    fleet.process.send_signal(signal.SIGHUP)
    fleet.wait(lambda: "changes made" in (fleet.directory / "deploy.log").read_text(), PATIENCE, "done")
    fleet.wait(lambda: all(fleet.get("/v1/models").status_code == 200 for _ in range(16)), PATIENCE, "open again")
    fleet.wait(lambda: "frontdesk" not in fleet.get("/health").json()["models"], PATIENCE, "without frontdesk")
    gone = {"frontdesk"}
    fleet.wait(lambda: not any(gone & {*names} for names in units(fleet).values()), PATIENCE, "without its unit")


def test_a_model_is_added_and_removed(fleet: Fleet, tmp_path: Path) -> None:
    taken_out(fleet, "frontdesk")
    file = tmp_path / "more.yaml"
    file.write_text(f"models: [{{name: frontdesk, path: {MODELS / 'frontdesk'}, dtype: float32}}]")
    added = command("add", str(file))
    assert added.returncode == 0, added.stderr
    assert "done: frontdesk is served (u" in added.stdout
    assert ask(fleet, "frontdesk", "When does the library open on Tuesday?")
    assert [each.id for each in fleet.client.models.list()] == ["arithmetic", "atlas", "nap", "frontdesk"]
    again = command("add", str(file))
    assert again.returncode == 2
    assert f"{file}:1: models[0].name: the fleet has a model 'frontdesk' already" in again.stderr
    removed = command("remove", "frontdesk")
    assert removed.returncode == 0, removed.stderr
    with pytest.raises(openai.NotFoundError):
        ask(fleet, "frontdesk", "When does the library open on Tuesday?")
    assert "frontdesk" not in {name for served in units(fleet).values() for name in served}


@pytest.mark.thorough
def test_a_fleet_is_changed_over_http(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an admin alone; and who asks for a model right after it was added gets an answer of every gateway."""
    taken_out(fleet, "frontdesk")
    (unit,) = [name for name, served in units(fleet).items() if "arithmetic" in served]
    new = f"models:\n- name: frontdesk\n  path: {MODELS / 'frontdesk'}\n  dtype: float32\n  rate: 2\n"
    added, gone = f"/admin/models?unit={unit}", "/admin/models/frontdesk"

    def change(path: str, body: str, key: str = "", method: str = "POST") -> tuple[int, dict[str, Any]]:
        """Over a connection of its own, so that any gateway may answer."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.request(method, f"{fleet.url}{path}", content=body, headers=headers, timeout=4 * PATIENCE)
        return answer.status_code, answer.json()

    def told(status: int, answer: tuple[int, dict[str, Any]]) -> str:
        assert answer[0] == status, answer
        text: str = answer[1]["error"]["message"] if status != 200 else answer[1]["text"]
        return text

    assert "this fleet has no keys" in told(403, change(added, new))
    monkeypatch.setenv("OUR_KEYS", "of-the-admin")
    monkeypatch.setenv("TEAM_KEYS", "of-the-team")
    keys = {
        **FLEET,
        "gateway": {"count": 2, "api_keys": ["env:OUR_KEYS"]},
        "tenants": {"team": {"keys": ["env:TEAM_KEYS"]}},
    }
    locked, open_to_all = fleet.directory / "locked.yaml", fleet.directory / "open.yaml"
    locked.write_text(yaml.safe_dump(keys))
    open_to_all.write_text(yaml.safe_dump(FLEET))
    applied = command("apply", str(locked))
    assert applied.returncode == 0, applied.stdout + applied.stderr
    try:
        told(401, change(added, new))
        told(401, change(gone, "", method="DELETE"))
        assert "is for admins" in told(403, change(added, new, "of-the-team"))
        wrong = new.replace("rate: 2", "rate: often")
        assert "body:5: models[0].rate: " in told(400, change(added, wrong, "of-the-admin"))
        assert "there is no unit u99" in told(400, change("/admin/models?unit=u99", new, "of-the-admin"))
        assert "nothing was changed" in told(400, change(gone, "", "of-the-admin", "DELETE"))

        assert told(200, change(added, new, "of-the-admin")) == f"frontdesk is served ({unit})"
        for _ in range(8):
            with openai.OpenAI(
                base_url=f"{fleet.url}/v1", api_key="of-the-team", max_retries=0, timeout=4 * PATIENCE
            ) as team:
                messages: Any = [{"role": "user", "content": "When does the library open on Tuesday?"}]
                answer = team.chat.completions.create(
                    model="frontdesk", messages=messages, max_tokens=16, temperature=0
                )
            assert answer.choices[0].message.content
        assert told(200, change(gone, "", "of-the-admin", "DELETE")) == "frontdesk is served no longer"
        asked = '{"model": "frontdesk", "messages": [{"role": "user", "content": "Hello?"}]}'
        for _ in range(8):
            assert "'frontdesk' does not exist" in told(404, change("/v1/chat/completions", asked, "of-the-team"))

        back = open_to_all.read_text()
        planned = change("/admin/apply?dry_run=true", back, "of-the-admin")
        assert "gateway.api_keys" in told(200, planned)
        assert planned[1]["result"] == "planned"
        told(401, change("/admin/apply", back))
        applied_over_http = change("/admin/apply", back, "of-the-admin")
        told(200, applied_over_http)
        assert applied_over_http[1]["result"] == "done"
        assert {fleet.get("/v1/models").status_code for _ in range(16)} == {200}
    finally:
        opened = command("apply", str(open_to_all))
    assert opened.returncode == 0, opened.stderr


@pytest.mark.thorough
async def test_a_model_joins_a_unit_and_its_pool(fleet: Fleet, tmp_path: Path) -> None:
    """While others are served there; also when it had left, and when what has it only in memory dies."""
    await asyncio.to_thread(taken_out, fleet, "frontdesk")
    file = tmp_path / "more.yaml"
    file.write_text(f"models: [{{name: frontdesk, path: {MODELS / 'frontdesk'}, dtype: float32, rate: 2}}]")
    (unit,) = [name for name, served in units(fleet).items() if "arithmetic" in served]
    question = "When does the library open on Tuesday?"
    said, stop = set(), asyncio.Event()
    asking = [asyncio.create_task(keep_asking(fleet, stop)) for _ in range(2)]
    for _ in range(2):
        added = await asyncio.to_thread(command, "add", str(file), "--unit", unit)
        assert added.returncode == 0, added.stderr
        assert added.stdout.splitlines()[-1] == f"done: frontdesk is served ({unit})"
        assert {*units(fleet)[unit]} >= {"arithmetic", "frontdesk"}
        said.add(await asyncio.to_thread(ask, fleet, "frontdesk", question))
        quotas = quotas_of(fleet, unit)
        assert quotas["frontdesk"] > 0
        removed = await asyncio.to_thread(command, "remove", "frontdesk")
        assert removed.returncode == 0, removed.stderr
        assert units(fleet)[unit] == ["arithmetic"]
    stop.set()
    assert len({answer for each in await asyncio.gather(*asking) for answer in each}) == 1
    added = await asyncio.to_thread(command, "add", str(file), "--unit", unit)
    assert added.returncode == 0, added.stderr
    for word in ("muxserve-memory-manager", "muxserve.unit.scheduler"):
        for process in fleet.parts(word):
            process.kill()
        said.add(await asyncio.to_thread(ask, fleet, "frontdesk", question))
    assert len(said) == 1
    await asyncio.to_thread(taken_out, fleet, "frontdesk")
    refused = await asyncio.to_thread(command, "add", str(file), "--unit", "u99")
    assert refused.returncode == 2
    assert "there is no unit u99" in refused.stderr


def quotas_of(fleet: Fleet, unit: str) -> dict[str, int]:
    (found,) = [each for each in fleet.get("/fleet").json()["units"] if each["name"] == unit]
    return {name: state["quota_pages"] for name, state in found["state"]["models"].items()}


@pytest.mark.thorough
def test_a_change_that_fails_changes_nothing(fleet: Fleet, tmp_path: Path) -> None:
    fleet.wait(lambda: model(fleet, "atlas")["status"] == "asleep", PATIENCE, "asleep")
    # It is forked last, when the fleet serves already.
    fleet.wait(lambda: fleet.parts("muxserve spare vLLM parent"), PATIENCE, "with its spare parent")
    broken = tmp_path / "broken"
    shutil.copytree(MODELS / "atlas", broken)
    # Its weights are of another shape, which nobody sees before an engine loads them.
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    file = tmp_path / "broken.yaml"
    file.write_text("models: [{name: broken, path: broken, dtype: float32}]")
    before, running_before = units(fleet), processes(fleet)
    failed = command("add", str(file))
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "cannot start" in failed.stderr
    assert "nothing was changed" in failed.stderr
    for code, words in ((1, "scale arithmetic=0"), (1, "scale atlas=3"), (1, "drain u0"), (2, "remove broken")):
        refused = command(*words.split())
        assert refused.returncode == code, words
        assert refused.stderr.startswith("error: "), words
    assert units(fleet) == before
    # Some of those that ran before may only have been ending.

    def more() -> list[str]:
        return [" ".join(line) for process, line in fleet.commands() if process.pid not in running_before]

    eventually(lambda: not more(), lambda: f"without {more()}")
    assert "broken" not in fleet.get("/health").json()["models"]
    assert ask(fleet, "arithmetic", "What is 14 plus 29?")


@pytest.mark.thorough
def test_a_fleet_without_any_unit_is_woken(fleet: Fleet) -> None:
    """The last test of this fleet: what never sleeps is taken out."""
    for name in ("arithmetic", "frontdesk"):
        taken_out(fleet, name)
    fleet.wait(lambda: units(fleet) == {} and managers(fleet) == 0, PATIENCE, "without units")
    assert fleet.get("/health").json()["status"] == "ok"
    assert "Paris" in ask(fleet, "atlas", "What is the capital of France?")
    assert model(fleet, "atlas")["status"] == "up"
