"""Batches over their store and runner: deaths in the middle, leases, refusals, and the routes of files and batches."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from muxserve.gateway.batches import runner as runner_module
from muxserve.gateway.batches import store as store_module
from muxserve.gateway.batches.asking import WholeAnswer, ask
from muxserve.gateway.batches.lines import PlannedLine
from muxserve.gateway.batches.routes import MOST_OF_ONE, BatchRoutes, apps
from muxserve.gateway.batches.runner import BatchRunner
from muxserve.gateway.batches.store import LEASE_SECONDS, BatchStore, FullError, LeaseLostError, StoredBatch
from muxserve.gateway.http import body as body_module
from muxserve.gateway.http.errors import Receive, Scope, Send, respond_json
from muxserve.gateway.http.http_request import BatchCaller, current_http
from muxserve.gateway.limits.admission import Caller
from muxserve.spec import BatchesSpec, BudgetSpec, TenantLimits
from tests.gateway.test_batch_pace import CHAT, line
from tests.gateway.test_tenants import OPERATOR, Endpoint, tenant
from tests.support.patience import PATIENCE


class Room:
    """As many requests of batches at once as it says."""

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self.running: Counter[str] = Counter()

    def began(self, model: str) -> None:
        self.running[model] += 1

    def ended(self, model: str) -> None:
        self.running[model] -= 1

    async def look(self) -> None:
        pass

    def room(self, model: str) -> int:
        return self.most - self.running[model]


class Work:
    """A gateway that answers as the test wants, and counts what it was asked."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Any]) -> None:
        self.answer = answer
        self.asked: Counter[str] = Counter()
        self.inside = asyncio.Event()
        self.revoked: set[str] = set()
        self.ends = False

    def model_of(self, batch: StoredBatch, asked: str | None) -> str:
        if asked != "a":
            raise ValueError("there is no such model")
        return "a"

    def is_revoked(self, batch: StoredBatch) -> bool:
        return batch.key in self.revoked

    def draining(self) -> bool:
        return self.ends

    async def ask(self, batch: StoredBatch, body: bytes) -> WholeAnswer:
        asked = json.loads(body)
        name = asked["user"]
        self.asked[name] += 1
        self.inside.set()
        answer = self.answer(asked, self.asked[name])
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = 200
        return WholeAnswer(answer, f"r-{name}", b'{"said": "%s"}' % name.encode())


class Batches:
    """A store in a directory, with a clock of its own."""

    def __init__(self, directory: Path, **spec: Any) -> None:
        self.now = 1000.0
        self.spec = BatchesSpec(str(directory / "batches"), **spec)
        self.store = self.another()
        self.tasks: list[asyncio.Task[None]] = []

    def another(self) -> BatchStore:
        """The store as another process has it."""
        return BatchStore(self.spec, lambda: self.now)

    def new(self, *names: str, window: float = 86400.0, texts: bytes = b"", key: str = "") -> str:
        body = texts or b"".join(line(name, body={"model": "a", "messages": [], "user": name}) for name in names)
        path = self.store.new_path()
        path.write_bytes(body)
        file = self.store.add_file("-", "batch", "in.jsonl", path)
        return self.store.create("-", key, CHAT, file.id, ("24h", window), None)

    def run(self, work: Work, room: Room | None = None, store: BatchStore | None = None) -> BatchRunner:
        runner = BatchRunner(store or self.store, work, room or Room())
        self.tasks.append(asyncio.create_task(runner.run()))
        return runner

    async def kill(self) -> None:
        """End every runner, as if its process had died: nothing is written any more, and no lease is let go."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()

    def shown(self, name: str) -> dict[str, Any]:
        (batch,) = self.store.shown("-", name)
        return batch

    async def until(self, name: str, *statuses: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            while (batch := self.shown(name))["status"] not in statuses:
                await asyncio.sleep(0.01)
        return batch

    def results(self, name: str | None) -> dict[str, dict[str, Any]]:
        if name is None:
            return {}
        rows = [json.loads(text) for text in self.store.path(name).read_text().splitlines()]
        found = {row["custom_id"]: row for row in rows}
        assert len(found) == len(rows), "a result is there twice"
        return found


@pytest.fixture
async def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Batches]:
    monkeypatch.setattr(runner_module, "BUSY_SECONDS", 0.01)
    monkeypatch.setattr(runner_module, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(runner_module, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(runner_module, "FIRST_PAUSE", 0.001)
    found = Batches(tmp_path)
    yield found
    await found.kill()
    found.store.close()


def ok(asked: dict[str, Any], tries: int) -> int:
    return 200


# ------------------------------------------------------------ runs


async def test_each_line_has_its_result(batches: Batches) -> None:
    def answer(asked: dict[str, Any], tries: int) -> int:
        return {"bad": 400, "busy": 200 if tries == 3 else 429, "gone": 503 if tries == 1 else 200}.get(
            asked["user"], 200
        )

    work = Work(answer)
    names = [f"n{number}" for number in range(10)]
    name = batches.new("bad", "busy", "gone", *names)
    batches.run(work)
    batch = await batches.until(name, "completed")
    assert batch["request_counts"] == {"total": 13, "completed": 12, "failed": 1}
    done, failed = batches.results(batch["output_file_id"]), batches.results(batch["error_file_id"])
    # In the order of the file.
    assert [*done] == ["busy", "gone", *names]
    assert done["n3"]["response"] == {"status_code": 200, "request_id": "r-n3", "body": {"said": "n3"}}
    assert failed["bad"]["response"]["status_code"] == 400
    assert (work.asked["busy"], work.asked["gone"], work.asked["bad"], work.asked["n3"]) == (3, 2, 1, 1)
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]


async def test_what_the_server_fails_is_asked_three_times(batches: Batches) -> None:
    work = Work(lambda asked, tries: 500)
    name = batches.new("one")
    batches.run(work)
    batch = await batches.until(name, "completed")
    assert batch["output_file_id"] is None
    assert batches.results(batch["error_file_id"])["one"]["response"]["status_code"] == 500
    assert work.asked["one"] == 3


async def test_no_more_are_asked_at_once_than_there_is_room_for(batches: Batches) -> None:
    hold, most = asyncio.Event(), 0
    room = Room(3)
    work = Work(lambda asked, tries: hold)
    names = [batches.new(*(f"{part}{number}" for number in range(5))) for part in "xy"]
    batches.run(work, room)
    await work.inside.wait()
    async with asyncio.timeout(PATIENCE):
        while sum(work.asked.values()) < 3:
            await asyncio.sleep(0.001)
    # Both have their turn.
    assert {each[0] for each in work.asked} == {"x", "y"}
    most = max(most, room.running["a"])
    hold.set()
    for name in names:
        await batches.until(name, "completed")
    assert most == 3
    assert room.running["a"] == 0


async def test_few_lines_of_a_batch_are_in_memory(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PORTION", 4)
    held: list[int] = []

    def answer(asked: dict[str, Any], tries: int) -> int:
        running = runner._running[name]
        held.append(running.held("a") + running.held("b"))
        return 429 if tries == 1 and int(asked["user"]) % 3 == 0 else 200

    work = Work(answer)
    work.model_of = lambda batch, asked: asked or ""  # type: ignore[method-assign]
    lines = [line(str(each), body={"model": "ab"[each % 2], "messages": [], "user": str(each)}) for each in range(40)]
    name = batches.new(texts=b"".join(lines))
    runner = batches.run(work, Room(2))
    batch = await batches.until(name, "completed")
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert [*batches.results(batch["output_file_id"])] == [str(each) for each in range(40)]
    # Each model: less than a portion, and the next one.
    assert max(held) <= 2 * 2 * 4


async def test_a_wrong_file_fails_as_a_whole(batches: Batches) -> None:
    work = Work(ok)
    name = batches.new(texts=line("one") + b"nonsense\n" + line("two", body={"model": "b"}))
    batches.run(work)
    batch = await batches.until(name, "failed")
    assert [(each["line"], each["code"]) for each in batch["errors"]["data"]] == [
        (2, "invalid_json_line"),
        (3, "model_not_found"),
    ]
    assert not work.asked


# ------------------------------------------------------------ deaths and leases


async def test_a_runner_that_dies_loses_and_repeats_no_result(batches: Batches) -> None:
    hold = asyncio.Event()
    first = Work(lambda asked, tries: hold if asked["user"] == "n5" else 200)
    name = batches.new(*(f"n{number}" for number in range(10)))
    batches.run(first, Room(1))
    async with asyncio.timeout(PATIENCE):
        while not first.asked["n5"]:
            await asyncio.sleep(0.001)
    await batches.kill()
    assert batches.shown(name)["request_counts"]["completed"] == 5
    second, other = Work(ok), batches.another()
    batches.run(second, Room(1), other)
    # The lease is still the dead one's.
    await asyncio.sleep(0.1)
    assert not second.asked
    batches.now += LEASE_SECONDS + 1
    batch = await batches.until(name, "completed")
    assert batch["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
    assert len(batches.results(batch["output_file_id"])) == 10
    assert sorted(second.asked) == ["n5", "n6", "n7", "n8", "n9"]
    assert sum((first.asked + second.asked).values()) == 11  # n5, which had no answer, was asked twice
    await batches.kill()
    other.close()


async def test_a_runner_that_was_stopped_writes_nothing_any_more(batches: Batches) -> None:
    name = batches.new("one")
    assert batches.store.claim()
    other = batches.another()
    assert not other.claim()
    batches.now += LEASE_SECONDS + 1
    assert other.claim()
    with pytest.raises(LeaseLostError):
        batches.store.finish(name, 0, True, "late")
    with pytest.raises(LeaseLostError):
        batches.store.begin(name, [])
    assert not batches.store.claim()
    other.release()
    assert batches.store.claim()
    other.close()


async def test_a_gateway_that_drains_finishes_what_it_asked_and_lets_go(batches: Batches) -> None:
    hold = asyncio.Event()
    work = Work(lambda asked, tries: hold)
    name = batches.new("one", "two")
    batches.run(work, Room(1))
    await work.inside.wait()
    work.ends = True
    other = batches.another()
    # However long that takes, nobody else asks the same again.
    for _ in range(3):
        batches.now += LEASE_SECONDS - 1
        ends = batches.now + LEASE_SECONDS
        async with asyncio.timeout(PATIENCE):
            while other._rows("SELECT until FROM runner", ()) != [(ends,)]:
                await asyncio.sleep(0.01)
        assert not other.claim()
    hold.set()
    async with asyncio.timeout(PATIENCE):
        while not other.claim():
            await asyncio.sleep(0.01)
    assert sum(work.asked.values()) == 1
    assert batches.shown(name)["request_counts"]["completed"] == 1
    other.close()


async def test_a_death_while_the_files_are_written_ends_in_one_of_each(batches: Batches) -> None:
    name = batches.new("one", "two")
    work = Work(ok)
    end = batches.store.end

    def dies(*args: Any) -> None:
        replaced = batches.store._insert_file
        batches.store._insert_file = lambda file: (_ for _ in ()).throw(RuntimeError)  # type: ignore[method-assign]
        try:
            end(*args)
        finally:
            batches.store._insert_file = replaced  # type: ignore[method-assign]

    batches.store.end = dies  # type: ignore[method-assign,assignment]
    batches.run(work)
    await batches.until(name, "finalizing")
    await batches.kill()
    batches.store.end = end  # type: ignore[method-assign]
    batches.run(work)
    batch = await batches.until(name, "completed")
    assert len(batches.results(batch["output_file_id"])) == 2
    assert [file.filename for file in batches.store.files("-")].count(f"{name}_output.jsonl") == 1
    assert sum(work.asked.values()) == 2


async def test_a_runner_that_was_stopped_while_it_wrote_the_files_leaves_those_of_the_next_one(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = batches.new("one", "two")
    store, other = batches.store, batches.another()
    assert store.claim()
    store.begin(name, [PlannedLine(number, f"n{number}", 0, 1, "a") for number in range(2)])
    for number in range(2):
        store.finish(name, number, True, json.dumps({"custom_id": f"n{number}"}))
    store.finalizing(name)
    (batch,) = store.open_batches()
    results = BatchStore._results

    def stops(which: BatchStore, name: str, ok: int) -> Iterator[str]:
        found = results(which, name, ok)
        yield from itertools.islice(found, 1)
        if which is store and ok and other.open_batches():
            batches.now += LEASE_SECONDS + 1
            assert other.claim()
            other.end(batch, "completed", lambda line: "")
            return
        yield from found

    monkeypatch.setattr(BatchStore, "_results", stops)
    with pytest.raises(LeaseLostError):
        store.end(batch, "completed", lambda line: "")
    # Nor does it change anything when it has the lease again, and goes on only then.
    other.release()
    assert store.claim()
    store.end(batch, "completed", lambda line: "")
    other.close()
    shown = batches.shown(name)
    assert [*batches.results(shown["output_file_id"])] == ["n0", "n1"]
    assert len([*store._files.iterdir()]) == 2  # with the input


def test_a_lease_holds_no_longer_than_it_may_when_the_clock_is_set_back(batches: Batches) -> None:
    assert batches.store.claim()
    other = batches.another()
    batches.now -= 3600.0
    assert other.claim()
    assert not batches.store.claim()
    other.close()


async def test_a_batch_that_cannot_go_on_stops_no_other(batches: Batches, caplog: pytest.LogCaptureFixture) -> None:
    work = Work(ok)
    first, second = batches.new("one"), batches.new("two")
    asked_for = work.model_of

    def model_of(batch: StoredBatch, asked: str | None) -> str:
        if batch.id == first:
            raise RuntimeError("dictionary changed size during iteration")
        return asked_for(batch, asked)

    work.model_of = model_of  # type: ignore[method-assign]
    batches.run(work)
    await batches.until(second, "completed")
    assert f"batch {first} cannot go on at present" in caplog.text
    work.model_of = asked_for  # type: ignore[method-assign]
    await batches.until(first, "completed")


# ------------------------------------------------------------ ends


async def test_a_runner_that_is_ended_in_the_moment_when_there_is_news_ends(batches: Batches) -> None:
    runner = batches.run(Work(lambda asked, tries: 200))
    (task,) = batches.tasks
    await asyncio.sleep(0)
    runner.look()
    task.cancel()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("how", ["cancelled", "revoked", "expired"])
async def test_what_has_no_answer_at_the_end_is_in_the_error_file(batches: Batches, how: str) -> None:
    hold = asyncio.Event()
    work = Work(lambda asked, tries: hold if asked["user"] == "two" else 200)
    name = batches.new("one", "two", "three", window=60.0, key="key_1")
    runner = batches.run(work, Room(1))
    async with asyncio.timeout(PATIENCE):
        while not work.asked["two"]:
            await asyncio.sleep(0.001)
    if how == "cancelled":
        batches.store.cancel(name)
    elif how == "revoked":
        work.revoked.add("key_1")
    else:
        batches.now += 61.0
        # Its lease has ended meanwhile, and is renewed.
    runner.look()
    batch = await batches.until(name, "cancelled", "expired")
    assert batch["status"] == ("expired" if how == "expired" else "cancelled")
    assert [*batches.results(batch["output_file_id"])] == ["one"]
    failed = batches.results(batch["error_file_id"])
    assert {each["error"]["code"] for each in failed.values()} == {
        "batch_expired" if how == "expired" else "batch_cancelled"
    }
    assert [*failed] == ["two", "three"]
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


async def test_old_files_go_and_those_in_use_stay(batches: Batches) -> None:
    name = batches.new("one", window=10 * 86400.0)
    path = batches.store.new_path()
    path.write_bytes(b"left")
    batches.now += batches.spec.keep_seconds + 3601.0
    os.utime(path, (1.0, 1.0))
    batches.store.tidy()
    assert not path.exists()
    assert batches.store.path(batches.shown(name)["input_file_id"]).exists()
    batches.store.cancel(name)
    assert batches.store.claim()
    (batch,) = batches.store.open_batches()
    batches.store.end(batch, "cancelled", lambda line: "")
    batches.store.tidy()
    assert batches.store.shown("-") == []
    assert not batches.store.path(batch.input_file_id).exists()


def test_files_have_a_bound(tmp_path: Path) -> None:
    found = Batches(tmp_path, max_bytes=10)
    path = found.store.new_path()
    path.write_bytes(b"x" * 11)
    with pytest.raises(FullError, match="10 is the most"):
        found.store.add_file("-", "batch", "in.jsonl", path)
    assert found.store.files("-") == []


# ------------------------------------------------------------ the endpoint


class Served:
    """An endpoint with batches, asked by the official client."""

    def __init__(self, directory: Path, *tenants: Any) -> None:
        self.endpoint = Endpoint(directory, *tenants)
        self.store = BatchStore(BatchesSpec(str(directory / "batches")))
        routes = BatchRoutes(self.store, lambda: None)
        object.__setattr__(self.endpoint.app._own, "caller_apps", apps(routes))

    def client(self, key: str = OPERATOR) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(transport=self.transport),
        )

    @property
    def transport(self) -> Any:
        # Of the library that the client uses, which may be another than ours.
        library = __import__(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
        return library.ASGITransport(self.endpoint.app)


async def test_files_and_batches_by_the_official_client(tmp_path: Path) -> None:
    served = Served(tmp_path, tenant("one"), tenant("two"))
    text = line("first") * 3000
    async with served.client("one") as one, served.client("two") as two, served.client() as operator:
        file = await one.files.create(file=("in.jsonl", text), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(text), "in.jsonl", "batch")
        assert (await one.files.content(file.id)).content == text
        assert [each.id async for each in one.files.list()] == [file.id]
        batch = await one.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "tests"}
        )
        assert (batch.status, batch.metadata, batch.request_counts and batch.request_counts.total) == (
            "validating",
            {"for": "tests"},
            0,
        )
        assert (await one.batches.retrieve(batch.id)).id == batch.id
        with pytest.raises(openai.BadRequestError, match="cancel that first"):
            await one.files.delete(file.id)
        # Each sees its own.
        for other in (two, operator):
            assert [each.id async for each in other.files.list()] == []
            assert [each.id async for each in other.batches.list()] == []
            for asking in (other.files.retrieve(file.id), other.batches.retrieve(batch.id)):
                with pytest.raises(openai.NotFoundError):
                    await asking
            with pytest.raises(openai.BadRequestError, match="there is no file"):
                await other.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
        assert (await one.batches.cancel(batch.id)).status == "cancelling"
        more = [
            (
                await one.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
            ).id
            for _ in range(4)
        ]
        assert {each.id async for each in one.batches.list(limit=2)} == {batch.id, *more}
    served.store.close()


async def test_mistakes_about_batches_say_what_to_do(tmp_path: Path) -> None:
    served = Served(tmp_path)
    async with served.client() as client:
        with pytest.raises(openai.BadRequestError, match="'purpose' must be batch"):
            await client.files.create(file=("in.jsonl", b"{}"), purpose="fine-tune")
        file = await client.files.create(file=("../../in.jsonl", b"{}"), purpose="batch")
        assert file.filename == "in.jsonl"
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"endpoint": "/v1/moderations"}, "'endpoint' is one of /v1/chat/completions"),
            ({"completion_window": "soon"}, "'completion_window' is a time such as 24h"),
            ({"completion_window": "8d"}, "at most 7d"),
            ({"metadata": {"x" * 65: ""}}, "'metadata' has at most 16"),
            ({"input_file_id": "file-none"}, "there is no file 'file-none'"),
        ]
        for changes, words in wrong:
            order = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **changes}
            with pytest.raises(openai.BadRequestError, match=words):
                await client.batches.create(**order)
        await client.files.delete(file.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)
    async with served.endpoint.client(OPERATOR) as http:
        plain = await http.post("/v1/files", json={"purpose": "batch"})
        assert "multipart/form-data" in plain.json()["error"]["message"]
        broken = await http.post(
            "/v1/files", content=b"no form", headers={"content-type": "multipart/form-data; boundary=x"}
        )
        assert broken.status_code == 400
        assert (await http.put("/v1/files")).status_code == 405
        for limit in ("x", "0", "-1", "%C2%B2", "9" * 5000):
            assert (await http.get(f"/v1/batches?limit={limit}")).status_code == 400
    assert [path.name for path in (tmp_path / "batches/files").iterdir()] == []
    served.store.close()


class Upload:
    """A client that sends a file, and no more of it than it wants to."""

    def __init__(self, served: Served, key: str) -> None:
        self.status = 0
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        headers = [
            (b"authorization", f"Bearer {key}".encode()),
            (b"content-type", b"multipart/form-data; boundary=x"),
        ]
        scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": headers}
        self.task = asyncio.create_task(served.endpoint.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        part = await self.parts.get()
        if not part:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": True}

    async def _send(self, message: Any) -> None:
        self.status = self.status or message["status"]


async def test_a_tenant_leaves_places_for_files_of_others(tmp_path: Path) -> None:
    served = Served(tmp_path, tenant("one"), tenant("two"))
    first = [Upload(served, "one") for _ in range(MOST_OF_ONE)]
    await asyncio.sleep(0)
    over = Upload(served, "one")
    async with asyncio.timeout(PATIENCE):
        await over.task
    assert over.status == 503
    async with served.client("two") as two:
        await two.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    for each in first:
        each.parts.put_nowait(b"")
    await asyncio.gather(*(each.task for each in first))
    async with served.client("one") as one:
        await one.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    served.store.close()


async def test_a_file_that_comes_too_slowly_keeps_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(body_module, "SLOWEST_BYTES_PER_SECOND", 1 << 30)
    served = Served(tmp_path)
    upload = Upload(served, OPERATOR)
    upload.parts.put_nowait(FILE_PART)
    async with asyncio.timeout(PATIENCE):
        while not upload.task.done():
            upload.parts.put_nowait(b" ")
            await asyncio.sleep(0.01)
    assert upload.status == 408
    served.store.close()


FILE_PART = b'--x\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'


async def test_a_file_that_does_not_come_to_its_end_leaves_nothing(tmp_path: Path) -> None:
    served = Served(tmp_path)
    there = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        upload = Upload(served, OPERATOR)
        upload.parts.put_nowait(FILE_PART + b"x" * (3 << 20))
        upload.parts.put_nowait(b"")
        await upload.task
        assert os.listdir(tmp_path / "batches/files") == []
        assert len(os.listdir("/proc/self/fd")) <= there
    finally:
        gc.enable()
    served.store.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"".join(b'--x\r\ncontent-disposition: form-data; name="%d"\r\n\r\n\r\n' % n for n in range(99)), "16 parts"),
        (b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 100_000, "65536 bytes"),
        (b"--x\r\ncontent-disposition: form-data\r\n\r\nx\r\n--x--", "has no name"),
        (FILE_PART[:-2] + b"content-transfer-encoding: base64\r\n\r\neA==\r\n--x--", "is encoded"),
        (FILE_PART + b"cut off", "'purpose' must be batch"),
        (
            b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' + FILE_PART + b"cut off",
            "the form has no 'file'",
        ),
    ],
)
async def test_a_form_has_no_more_than_it_needs(tmp_path: Path, body: bytes, words: str) -> None:
    served = Served(tmp_path)
    async with served.endpoint.client(OPERATOR) as http:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        answer = await http.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert os.listdir(tmp_path / "batches/files") == []
    served.store.close()


def test_open_batches_of_one_keep_out_nobody_else(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_OPEN", 2)
    first, _ = batches.new("one"), batches.new("two")
    with pytest.raises(FullError, match="2 batches are open already"):
        batches.new("three")
    file = batches.store.open_batches()[0].input_file_id
    batches.store.create("another", "", CHAT, file, ("24h", 60.0), None)
    batches.store.cancel(first)
    assert batches.store.claim()
    (cancelled,) = (each for each in batches.store.open_batches() if each.id == first)
    batches.store.end(cancelled, "cancelled", lambda line: "")
    batches.new("three")


async def test_open_batches_of_one_have_no_more_lines_than_they_may(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MOST_OPEN_LINES", 3)
    room = Room(0)
    first = batches.new("one", "two")
    batches.run(Work(ok), room)
    await batches.until(first, "in_progress")
    over = await batches.until(batches.new("three", "four"), "failed")
    assert [each["code"] for each in over["errors"]["data"]] == ["too_many_open_requests"]
    await batches.until(batches.new("five"), "in_progress")
    room.most = 1
    await batches.until(first, "completed")
    await batches.until(batches.new("six", "seven"), "completed")


async def test_without_a_place_for_them_there_are_no_batches(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    object.__setattr__(endpoint.app._own, "caller_apps", apps(None))
    async with endpoint.client(OPERATOR) as http:
        answer = await http.get("/v1/batches")
    assert answer.status_code == 404
    assert "set gateway.batches in its fleet file" in answer.json()["error"]["message"]


async def test_a_batch_asks_as_its_tenant_behind_all_others(tmp_path: Path) -> None:
    limits = TenantLimits(requests_per_minute=1, tokens_per_minute=10, max_concurrency=1)
    spec = tenant("one", limits, budgets=(BudgetSpec("day", 45),))
    endpoint = Endpoint(tmp_path, spec)
    seen: list[Any] = []
    serve = endpoint.serve

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(current_http.get())
        await serve(scope, receive, send)

    for served in endpoint.app.models.values():
        object.__setattr__(served, "app", look)
    caller = BatchCaller(Caller("high", spec, "key_1"))
    body = json.dumps({"model": "a", "prompt": "x"}).encode()
    # Limits by the minute are for those who wait for their answers; budgets are for all.
    answers = [await ask(endpoint.app, caller, "/v1/completions", body) for _ in range(4)]
    assert [each.status for each in answers] == [200, 200, 200, 429]
    assert b"insufficient_quota" in answers[-1].body
    assert answers[-1].retry_after > 0
    assert answers[0].request_id
    lowest = endpoint.app.access.priorities.of([(b"x-muxserve-priority", b"normal")], None)
    assert seen[0].priority.queue(0) > lowest.queue(1 << 40)
    assert seen[0].priority.engine(0) > lowest.engine(1 << 40)
    async with endpoint.client(OPERATOR) as http:
        (row,) = (await http.get("/admin/usage?by=key")).json()["data"]
    assert (row["tenant"], row["key"], row["requests"], row["output_tokens"]) == ("one", "key_1", 3, 15)
    # No latency of a request that nobody waits for.
    assert endpoint.sample("muxserve_time_to_first_token_seconds_count", model_name="a") == 0
    endpoint.tenancy.close()


async def test_a_request_of_a_batch_that_is_dropped_ends_as_one_whose_client_has_gone(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    inside, told = asyncio.Event(), asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        inside.set()
        assert (await receive())["type"] == "http.disconnect"
        http = current_http.get()
        assert http is not None
        assert http.disconnected
        told.set()
        await respond_json(send, {})

    for served in endpoint.app.models.values():
        object.__setattr__(served, "app", waits)
    asking = asyncio.create_task(ask(endpoint.app, BatchCaller(Caller()), "/v1/completions", b'{"model": "a"}'))
    await inside.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert told.is_set()


async def test_clients_cannot_say_that_they_are_a_batch(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path, tenant("one"))
    transport = httpx.ASGITransport(endpoint.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for headers in ({"muxserve.batch": "1"}, {"x-muxserve-batch": "1"}):
            answer = await http.post("/v1/completions", json={"model": "a"}, headers=headers)
            assert answer.status_code == 401
    endpoint.tenancy.close()
