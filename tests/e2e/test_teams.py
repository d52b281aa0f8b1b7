"""Teams at a live fleet of two gateways: keys that are revoked while it serves, budgets, usage over the death of a
gateway, fallbacks, and batches, with the official client and while streams are open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from tests.e2e.fleet import Fleet, running
from tests.e2e.load import greedy, stream_chat, until
from tests.e2e.test_degraded import spoiled
from tests.support import preloaded
from tests.support.patience import PATIENCE
from tests.support.tiny_checkpoint import tiny_checkpoint

OPERATOR = "key-of-the-operator"
STREAMS = 32
BUDGET = 2000
CHAT = "/v1/chat/completions"
FALLBACK = "x-muxserve-fallback"


def declared(directory: Path) -> dict[str, Any]:
    models: list[dict[str, Any]] = [
        {"name": name, "path": str(path), "dtype": "float32", "max_len": 256, "limits": {"max_wait": "none"}}
        for name, path in [
            ("chat", tiny_checkpoint()),
            ("spare", tiny_checkpoint(seed=1)),
            ("broken", spoiled(directory, "shapes", "config.json", intermediate_size=768)),
        ]
    ]
    models[2]["fallback"] = "spare"
    return {
        "kv_pool": {"size": "96MiB"},
        "gateway": {"count": 2, "api_keys": OPERATOR, "batches": "on"},
        "tenants": {"team": {}, "poor": {"budgets": {"day": {"chat": BUDGET}}}, "other": {}},
        "models": models,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the fleet file, the usage database and the batches."""
    directory = tmp_path_factory.mktemp("teams")
    (directory / "fleet.yaml").write_text(yaml.safe_dump(declared(directory)))
    return directory


@pytest.fixture(scope="module")
def fleet(place: Path) -> Iterator[Fleet]:
    with running(place / "fleet.yaml", environment={"MUXSERVE_API_KEY": OPERATOR}, start=preloaded.start) as deployed:
        deployed._http.headers["Authorization"] = f"Bearer {OPERATOR}"
        yield deployed


def client(fleet: Fleet, key: str = OPERATOR) -> openai.AsyncOpenAI:
    """A client whose requests each have a connection of their own, so that they come to both gateways."""
    limits = openai.DefaultAsyncHttpxClient(verify=False, headers={"Connection": "close"})
    return openai.AsyncOpenAI(
        base_url=f"{fleet.url}/v1", api_key=key, max_retries=0, timeout=4 * PATIENCE, http_client=limits
    )


def admin(fleet: Fleet, method: str, path: str, body: object = None) -> dict[str, Any]:
    answer = httpx.request(
        method, f"{fleet.url}{path}", json=body, headers={"Authorization": f"Bearer {OPERATOR}"}, timeout=PATIENCE
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def new_key(fleet: Fleet, tenant: str) -> tuple[str, str]:
    made = admin(fleet, "POST", "/admin/keys", {"tenant": tenant, "name": "test"})
    return made["id"], made["key"]


def used(fleet: Fleet, tenant: str) -> tuple[int, int]:
    """Requests of a tenant, and the tokens of its answers, of all gateways by now: the other one may take a second."""
    rows = admin(fleet, "GET", f"/admin/usage?tenant={tenant}")["data"]
    return sum(row["requests"] for row in rows), sum(row["output_tokens"] for row in rows)


def gateways(fleet: Fleet) -> list[psutil.Process]:
    return [process for process in fleet.parts("muxserve gateway") if process.status() != psutil.STATUS_ZOMBIE]


# ------------------------------------------------------------ keys


async def test_a_key_that_is_revoked_opens_no_gateway_and_its_streams_end_well(fleet: Fleet) -> None:
    name, key = new_key(fleet, "team")
    long = greedy("A key is revoked", 150)
    async with client(fleet, key) as asking:
        streams = [asyncio.create_task(stream_chat(asking, "chat", long)) for _ in range(STREAMS)]
        await until(lambda: fleet.get("/fleet").json()["models"][0]["gateway"]["running"] > 0, "streams in service")
        assert admin(fleet, "DELETE", f"/admin/keys/{name}")["status"] == "revoked"
        for _ in range(20):
            with pytest.raises(openai.AuthenticationError):
                await asking.models.list()
        answers = await asyncio.gather(*streams)
    assert {each["completion_tokens"] for each in answers} == {150}
    await until(lambda: used(fleet, "team") == (STREAMS, STREAMS * 150), "usage of all streams")
    of_key = [row for row in admin(fleet, "GET", "/admin/usage?by=key")["data"] if row["key"] == name]
    assert sum(row["output_tokens"] for row in of_key) == STREAMS * 150


def test_the_command_line_makes_and_revokes_keys_and_shows_usage(fleet: Fleet) -> None:
    made = fleet.command("keys", "create", "team", "--name", "ci", "--expires", "30d", "--url", fleet.url)
    assert made.returncode == 0, made.stderr
    key = made.stdout.splitlines()[-1]
    answer = httpx.get(f"{fleet.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE)
    assert answer.status_code == 200
    listed = fleet.command("keys", "list", "--url", fleet.url)
    row = next(line for line in listed.stdout.splitlines() if key[-4:] in line and "active" in line)
    revoked = fleet.command("keys", "revoke", row.split()[0], "--url", fleet.url)
    assert revoked.returncode == 0, revoked.stderr
    answer = httpx.get(f"{fleet.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE)
    assert answer.status_code == 401
    assert fleet.command("keys", "revoke", "key_none", "--url", fleet.url).returncode == 1
    wrong = fleet.command("keys", "create", "teem", "--url", fleet.url)
    assert (wrong.returncode, "did you mean 'team'?" in wrong.stderr) == (2, True)
    shown = fleet.command("usage", "--url", fleet.url)
    assert shown.returncode == 0, shown.stderr
    assert "budgets, in tokens of prompts and answers" in shown.stdout
    text = fleet.command("usage", "--csv", "--url", fleet.url).stdout
    assert text.splitlines()[0] == "day,tenant,model,requests,prompt_tokens,cached_tokens,output_tokens"
    assert json.loads(fleet.command("usage", "--json", "--by", "key", "--url", fleet.url).stdout)["object"] == "list"
    assert fleet.command("usage", "--since", "yesterday", "--url", fleet.url).returncode == 2


# ------------------------------------------------------------ budgets and usage


async def test_a_budget_holds_over_both_gateways_while_streams_are_open(fleet: Fleet) -> None:
    _, key = new_key(fleet, "poor")
    refusals: list[openai.RateLimitError] = []
    tokens = 0

    async def ask(asking: openai.AsyncOpenAI) -> None:
        nonlocal tokens
        while not refusals:
            try:
                answer = await stream_chat(asking, "chat", greedy("How much is left", 20))
            except openai.RateLimitError as error:
                refusals.append(error)
                return
            tokens += answer["prompt_tokens"] + answer["completion_tokens"]

    async with client(fleet, key) as asking:
        await asyncio.gather(*(ask(asking) for _ in range(8)))
        error = refusals[0].body
        assert isinstance(error, dict)
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        assert "tenant poor has used" in error["message"]
        assert "per day for model chat; the budget is reset at" in error["message"]
        # Every token was there before: with what ran at the end and what a gateway does not know of the other yet.
        assert tokens >= BUDGET

        def is_known() -> bool:
            (budget,) = admin(fleet, "GET", "/admin/usage?tenant=poor")["budgets"]
            return bool(budget["used"] == tokens)

        await until(is_known, f"budget of {tokens} tokens used")
        await asyncio.sleep(1.5)  # until both gateways have read what the other has written
        for _ in range(10):
            with pytest.raises(openai.RateLimitError):
                await asking.chat.completions.create(model="chat", messages=[{"role": "user", "content": "x"}])
        # It is of one model.
        assert (await stream_chat(asking, "spare", greedy("And here", 5)))["completion_tokens"] == 5


async def test_the_death_of_gateways_counts_nothing_twice_and_loses_what_is_said(fleet: Fleet) -> None:
    _, key = new_key(fleet, "other")
    before = used(fleet, "other")[1]
    answered = 0

    async def ask(asking: openai.AsyncOpenAI, rounds: int, cut: type[Exception] | tuple[()] = ()) -> None:
        nonlocal answered
        for _ in range(rounds):
            with contextlib.suppress(cut):
                answer = await stream_chat(asking, "chat", greedy("Who counts", 10))
                answered += answer["completion_tokens"]

    async with client(fleet, key) as asking:
        await asyncio.gather(*(ask(asking, 4) for _ in range(8)))
        counted = answered
        assert counted == 8 * 4 * 10
        found: list[int] = []

        def is_counted() -> bool:
            found[:] = [used(fleet, "other")[1] - before]
            return found == [counted]

        await until(is_counted, f"usage of {counted} tokens")
        # What was written stays, whoever dies in the middle of further writes.
        # A stream that is cut fails in the library that the client uses, which may be another than ours.
        asked = [asyncio.create_task(ask(asking, 12, Exception)) for _ in range(8)]
        await asyncio.sleep(0.3)
        for process in gateways(fleet):
            process.kill()
        await asyncio.gather(*asked)
        fleet.wait_healthy()
        await asyncio.gather(*(ask(asking, 2) for _ in range(8)))
    later = answered
    assert later >= counted + 8 * 2 * 10
    # Cut streams may count for what they had.
    most = counted + 8 * 12 * 10 + 8 * 2 * 10

    def is_whole() -> bool:
        return used(fleet, "other")[1] - before >= counted + 8 * 2 * 10

    await until(is_whole, "usage of the answers before and after")
    await asyncio.sleep(1.5)
    assert counted + 8 * 2 * 10 <= used(fleet, "other")[1] - before <= most


# ------------------------------------------------------------ fallbacks


async def test_a_degraded_model_falls_back_for_streams_and_whole_answers(fleet: Fleet, place: Path) -> None:
    request = greedy("Who answers", 12)
    async with client(fleet) as asking:
        own = await stream_chat(asking, "spare", request)

        async def stream() -> tuple[str, str]:
            raw = await asking.chat.completions.with_raw_response.create(model="broken", stream=True, **request)
            text = ""
            async for chunk in raw.parse():
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            return raw.headers.get(FALLBACK, ""), text

        answers = await asyncio.gather(*(stream() for _ in range(STREAMS)))
        assert set(answers) == {("spare", own["text"])}
        whole = await asking.chat.completions.with_raw_response.create(model="broken", **request)
        assert whole.headers[FALLBACK] == "spare"
        assert whole.parse().choices[0].message.content == own["text"]
        # Another endpoint: this one, asked as a client would.
        url = f"{fleet.url}/v1"
        changed = yaml.safe_load((place / "fleet.yaml").read_text())
        changed["models"][2]["fallback"] = {"url": url, "model": "chat", "key": f"file:{place / 'key'}"}
        (place / "key").write_text(OPERATOR)
        (place / "changed.yaml").write_text(yaml.safe_dump(changed))
        applied = await asyncio.to_thread(fleet.command, "apply", str(place / "changed.yaml"), "--url", fleet.url)
        assert applied.returncode == 0, applied.stderr
        there = await stream_chat(asking, "chat", request)
        answers = await asyncio.gather(*(stream() for _ in range(STREAMS)))
        assert set(answers) == {(f"{url} chat", there["text"])}
        metrics = fleet.get("/metrics").text
        assert f'muxserve_fallbacks_total{{gateway="0",fallback="{url} chat",model_name="broken"}}' in metrics or (
            f'muxserve_fallbacks_total{{gateway="1",fallback="{url} chat",model_name="broken"}}' in metrics
        )


# ------------------------------------------------------------ batches


def requests(count: int, tokens: int = 8) -> bytes:
    """The lines of a file: questions that differ, and one that is refused."""
    rows = []
    for number in range(count):
        body: dict[str, Any] = {
            "model": "chat",
            "messages": [{"role": "user", "content": f"Question {number}"}],
            "max_tokens": tokens if number else -1,
            "temperature": 0,
            "ignore_eos": True,
        }
        rows.append({"custom_id": f"q{number}", "method": "POST", "url": CHAT, "body": body})
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


async def create(asking: openai.AsyncOpenAI, text: bytes, window: Any = "24h") -> str:
    file = await asking.files.create(file=("questions.jsonl", text), purpose="batch")
    batch = await asking.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window=window, metadata={"of": "tests"}
    )
    return batch.id


async def ended(asking: openai.AsyncOpenAI, name: str) -> Any:
    async with asyncio.timeout(4 * PATIENCE):
        while True:
            # A gateway may just be dead.
            batch = None
            with contextlib.suppress(openai.APIConnectionError):
                batch = await asking.batches.retrieve(name)
            if batch is not None and batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.05)


async def rows(asking: openai.AsyncOpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    text = (await asking.files.content(file)).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({row["custom_id"] for row in found}) == len(found)
    return {row["custom_id"]: row for row in found}


async def test_a_batch_survives_the_death_of_every_gateway(fleet: Fleet, place: Path) -> None:
    count = 120
    _, key = new_key(fleet, "team")
    async with client(fleet, key) as asking:
        before = used(fleet, "team")
        name = await create(asking, requests(count))
        for _ in range(2):
            progress = (await asking.batches.retrieve(name)).request_counts
            begun = progress.completed if progress is not None else 0

            def further(begun: int = begun) -> bool:
                with sqlite3.connect(f"file:{place / 'batches/batches.sqlite'}?mode=ro", uri=True) as db:
                    (done,) = db.execute("SELECT completed FROM batches WHERE id = ?", (name,)).fetchone()
                return bool(done > begun + 5)

            await until(further, "answers of the batch")
            for process in gateways(fleet):
                process.kill()
            fleet.wait_healthy()
        batch = await ended(asking, name)
        assert batch.status == "completed"
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
            count,
            count - 1,
            1,
        )
        done, failed = await rows(asking, batch.output_file_id), await rows(asking, batch.error_file_id)
        assert [*failed] == ["q0"]
        assert failed["q0"]["response"]["status_code"] == 400
        assert sorted(done) == sorted(f"q{number}" for number in range(1, count))
        usage = {row["response"]["body"]["usage"]["completion_tokens"] for row in done.values()}
        assert usage == {8}
        # As an interactive request has it.
        answer = await asking.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "Question 7"}],
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        body = done["q7"]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == answer.choices[0].message.content
        # A request that was cut is asked again; with each death a second of usage may be lost.
        assert used(fleet, "team")[1] - before[1] <= (count + 2 * STREAMS) * 8


async def test_batches_are_cancelled_and_expire(fleet: Fleet) -> None:
    async with client(fleet) as asking:
        cancelled = await create(asking, requests(2000, 100))
        async with asyncio.timeout(PATIENCE):
            while (await asking.batches.retrieve(cancelled)).status != "in_progress":
                await asyncio.sleep(0.05)
        assert (await asking.batches.cancel(cancelled)).status == "cancelling"
        batch = await ended(asking, cancelled)
        assert batch.status == "cancelled"
        assert batch.request_counts.completed + batch.request_counts.failed == 2000
        left = await rows(asking, batch.error_file_id)
        assert {row["error"]["code"] for row in left.values() if row["error"]} == {"batch_cancelled"}
        expired = await create(asking, requests(2000, 100), "3s")
        batch = await ended(asking, expired)
        assert batch.status == "expired"
        left = await rows(asking, batch.error_file_id)
        assert {row["error"]["code"] for row in left.values() if row["error"]} == {"batch_expired"}
        wrong = await create(asking, b"nonsense\n")
        batch = await ended(asking, wrong)
        assert (batch.status, batch.errors.data[0].line) == ("failed", 1)
    fleet.wait_pages_free()


async def test_streams_are_answered_beside_a_batch(fleet: Fleet) -> None:
    """And the batch has few places beside them."""
    request = greedy("Is there room", 40)
    async with client(fleet) as asking:
        name = await create(asking, requests(400, 40))
        alone = await stream_chat(asking, "spare", request)
        answers = await asyncio.gather(*(stream_chat(asking, "spare", request) for _ in range(STREAMS)))
        assert all(answer == alone for answer in answers)
        await asking.batches.cancel(name)
        assert (await ended(asking, name)).status in ("cancelled", "completed")


@pytest.mark.thorough
async def test_a_batch_survives_the_end_of_the_fleet(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(declared(tmp_path)))
    environment = {"MUXSERVE_API_KEY": OPERATOR}
    with running(path, environment=environment, start=preloaded.start) as fleet:
        async with client(fleet) as asking:
            name = await create(asking, requests(600, 60))
            async with asyncio.timeout(PATIENCE):
                while not (await asking.batches.retrieve(name)).request_counts.completed:  # type: ignore[union-attr]
                    await asyncio.sleep(0.05)
    with running(path, environment=environment, start=preloaded.start) as fleet:
        async with client(fleet) as asking:
            batch = await ended(asking, name)
            assert batch.status == "completed"
            assert len(await rows(asking, batch.output_file_id)) == 599
