"""Kept responses: the file, and the real endpoint of two gateways with the real OpenAI client."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from muxserve.gateway.http import responses as responses_module
from muxserve.gateway.http.errors import RequestError
from muxserve.gateway.http.responses import ResponseStore, StoredResponse
from muxserve.spec import ResponsesSpec, TenantSpec
from tests.gateway.playing import play
from tests.gateway.rig import Rig, Running
from tests.gateway.test_tenants import tenant
from tests.gateway.unit_specs import fleet_of, model
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.tiny_checkpoint import tiny_checkpoint


def kept(status: str = "completed", size: int = 10, gateway: int = 0) -> StoredResponse:
    made = f'{{"status": "{status}"}}'
    return StoredResponse("alpha", "chat", gateway, status, made, "x" * (size - len(made)))


def store_in(directory: Path, gateway: int = 0, **spec: float) -> tuple[ResponseStore, list[float]]:
    now = [1000.0]
    given = msgspec.structs.replace(ResponsesSpec(str(directory / "responses.sqlite")), **spec)
    return ResponseStore(given, gateway, 2, lambda: now[0]), now


# ------------------------------------------------------------ the file


def test_a_response_belongs_to_who_asked_for_it(tmp_path: Path) -> None:
    (first, _), (second, _) = store_in(tmp_path), store_in(tmp_path, 1)
    first.save("team", "one", kept())
    assert second.find("team", "one") == kept()
    assert second.find("others", "one") is None
    second.delete("others", "one")
    assert first.find("team", "one") is not None
    second.delete("team", "one")
    assert first.find("team", "one") is None
    assert stat.S_IMODE((tmp_path / "responses.sqlite").stat().st_mode) == 0o600


def test_the_oldest_go_when_there_is_no_room_and_what_runs_stays(tmp_path: Path) -> None:
    store, now = store_in(tmp_path, max_bytes=300)
    for name, status in (("a", "queued"), ("b", "completed"), ("c", "completed")):
        now[0] += 1
        store.save("-", name, kept(status, 100))
    store.save("-", "c", kept(size=90))  # the same again: no more room is taken
    assert all(store.find("-", name) for name in "abc")
    now[0] += 1
    store.save("-", "d", kept(size=100))
    assert [name for name in "abcd" if store.find("-", name)] == ["a", "c", "d"]
    store.save("-", "e", kept(size=301))
    assert store.find("-", "e") is None
    assert store.find("-", "d") is not None


def test_none_is_kept_for_longer_than_it_may(tmp_path: Path) -> None:
    store, now = store_in(tmp_path, keep_seconds=60.0)
    store.save("-", "old", kept())
    now[0] += 30
    store.save("-", "new", kept())
    now[0] += 31
    assert store.find("-", "old") is None
    store.tidy()
    now[0] -= 31
    assert store.find("-", "old") is None
    assert store.find("-", "new") is not None


def test_what_a_gateway_was_making_has_failed_when_it_starts_again(tmp_path: Path) -> None:
    store, _ = store_in(tmp_path)
    store.save("-", "mine", kept("queued"))
    store.save("-", "its", kept("queued", gateway=1))
    store.save("-", "of a third", kept("in_progress", gateway=2))
    again, _ = store_in(tmp_path)
    statuses = {}
    for name in ("mine", "its", "of a third"):
        found = again.find("-", name)
        assert found is not None
        statuses[name] = found.status
        if found.status == "failed":
            assert msgspec.json.decode(found.response)["error"]["code"] == "server_error"
    assert statuses == {"mine": "failed", "its": "queued", "of a third": "failed"}


def test_a_fleet_that_takes_over_leaves_the_one_before_to_finish_what_it_makes(tmp_path: Path) -> None:
    before, now = store_in(tmp_path)
    before.save("one", "resp_1", kept("in_progress"))
    spec = ResponsesSpec(str(tmp_path / "responses.sqlite"))
    after = ResponseStore(spec, 0, 2, lambda: now[0], taking_over=True)
    found = after.find("one", "resp_1")
    assert found is not None
    assert found.is_running
    before.save("one", "resp_1", kept())
    found = after.find("one", "resp_1")
    assert found is not None
    assert found.status == "completed"
    before.close()
    after.close()


def test_the_end_of_a_response_in_the_background_is_written_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_module, "LOCKED_SECONDS", 0.01)
    store, _ = store_in(tmp_path, max_bytes=100)
    store.save("one", "resp_1", kept("in_progress", size=30))
    other = sqlite3.connect(tmp_path / "responses.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.save("one", "resp_1", kept(size=40))
    store.save("one", "at once", kept(size=40))  # its client has it
    other.execute("COMMIT")
    other.close()
    store.write_rest()
    found = store.find("one", "resp_1")
    assert found is not None
    assert found.status == "completed"
    assert store.find("one", "at once") is None
    assert not store._unwritten
    assert not store._running
    # One that may not be kept ends all the same.
    store.save("one", "resp_2", kept("in_progress", size=30))
    store.save("one", "resp_2", kept(size=101))
    found = store.find("one", "resp_2")
    assert found is not None
    assert found.status == "failed"
    assert "more than this server keeps" in msgspec.json.decode(found.response)["error"]["message"]
    store.close()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"responses cannot be kept in /not/there/responses\.sqlite"):
        store_in(Path("/not/there"))
    store, _ = store_in(tmp_path)
    store.close()
    with pytest.raises(RequestError, match="responses cannot be read at present"):
        store.find("-", "x")


# ------------------------------------------------------------ two gateways


class Pair:
    """Two gateways of a fleet, asked over their own sockets, so that it is known which of them answers."""

    def __init__(self, rig: Rig) -> None:
        directory = rig.directory / "kept"
        directory.mkdir()
        fleet = fleet_of(
            directory,
            [model("alpha", tiny_checkpoint()), model("beta", tiny_checkpoint())],
            unit="kept",
            port=free_port(),
            api_keys=["operator"],
            count=2,
            responses=ResponsesSpec(str(rig.directory / "responses.sqlite")),
        )
        tenants: tuple[TenantSpec, ...] = (tenant("team"),)
        self.rig = rig
        self.fleet = msgspec.structs.replace(fleet, tenants=tenants)
        self.running = [rig.start(self.fleet, index) for index in range(2)]
        self.running[0].engines()

    def client(self, index: int, key: str = "operator") -> openai.OpenAI:
        transport = httpx.HTTPTransport(uds=self.fleet.socket(f"http-{index}"))
        http = httpx.Client(transport=transport, timeout=PATIENCE)
        return openai.OpenAI(base_url="http://gateway/v1", api_key=key, max_retries=0, http_client=http)

    def start_again(self, index: int) -> None:
        os.kill(self.running[index].pid, signal.SIGKILL)
        self.running[index].exit_status()
        self.running[index] = self.rig.start(self.fleet, index)


@pytest.fixture(scope="module")
def pair(rig: Rig, gateway: Running) -> Pair:
    return Pair(rig)


def test_a_conversation_goes_on_in_another_gateway_and_after_a_restart(pair: Pair) -> None:
    first, second = pair.client(0), pair.client(1)
    asked = play("one")
    one = first.responses.create(model="alpha", input=asked, instructions="never said again")
    read = second.responses.retrieve(one.id)
    assert (read.output_text, read.status, read.id) == ("one", "completed", one.id)
    assert read.model_dump() == one.model_dump()
    pair.start_again(1)
    second = pair.client(1)
    mark = pair.running[0].mark()
    two = second.responses.create(model="alpha", input=play("two"), previous_response_id=one.id)
    assert (two.output_text, two.previous_response_id) == ("two", one.id)
    parts = [{"type": "input_text", "text": play("three")}]
    items: list[object] = [{"role": "user", "content": parts}]
    three = first.responses.create(model="beta", input=items, previous_response_id=two.id)  # type: ignore[arg-type]
    said = ["one", "two"]
    messages: list[object] = [{"role": "user", "content": asked}]
    for answer, question in zip(said, (play("two"), play("three")), strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    first.chat.completions.create(model="beta", messages=messages)  # type: ignore[arg-type]
    lengths = [e["prompt_tokens"] for e in pair.running[0].events(mark, "submit")]
    assert lengths[1] == lengths[2] > lengths[0]
    four = second.responses.create(model="beta", input=play("four"), previous_response_id=three.id)
    assert four.output_text == "four"


def test_a_stream_is_kept_too_and_what_is_not_to_be_stored_is_not(pair: Pair) -> None:
    first, second = pair.client(0), pair.client(1)
    events = list(first.responses.create(model="alpha", input=play("streamed"), stream=True))
    done = events[-1]
    assert done.type == "response.completed"
    assert second.responses.retrieve(done.response.id).output_text == "streamed"
    unkept = first.responses.create(model="alpha", input=play("secret"), store=False)
    with pytest.raises(openai.NotFoundError, match=f"there is no response '{unkept.id}'"):
        first.responses.retrieve(unkept.id)


def test_responses_are_seen_by_their_tenant_only_and_deleted(pair: Pair) -> None:
    made = pair.client(0, "team").responses.create(model="alpha", input=play("private"))
    for key in ("operator", "team"):
        client = pair.client(1, key)
        if key == "team":
            assert client.responses.retrieve(made.id).output_text == "private"
            client.responses.delete(made.id)
        for refused in (
            lambda client=client: client.responses.retrieve(made.id),
            lambda client=client: client.responses.create(model="alpha", input="x", previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()


def test_what_is_made_in_the_background_is_followed_and_cancelled_from_any_gateway(pair: Pair) -> None:
    first, second = pair.client(0), pair.client(1)
    mark = pair.running[0].mark()
    made = first.responses.create(model="alpha", input=play("in the background", hold=4), background=True)
    assert made.status == "queued"
    pair.running[0].wait("held", mark)
    assert second.responses.retrieve(made.id).status == "queued"
    # It is in service until it is done, also for the model's limits.
    assert load(first) == 1
    with pytest.raises(openai.BadRequestError, match="is not complete yet"):
        second.responses.create(model="alpha", input="x", previous_response_id=made.id)
    with pytest.raises(openai.BadRequestError, match="it was no stream in the background"):
        list(second.responses.retrieve(made.id, stream=True))
    mark = pair.running[0].mark()
    pair.running[0].tell_unit("go")
    while second.responses.retrieve(made.id).status == "queued":
        pass
    assert second.responses.retrieve(made.id).output_text == "in the background"
    with pytest.raises(openai.BadRequestError, match="is completed; only a background response"):
        second.responses.cancel(made.id)
    while load(first):
        pass

    mark = pair.running[0].mark()
    endless = first.responses.create(model="alpha", input=play("for ever", hold=3), background=True)
    pair.running[0].wait("held", mark)
    assert second.responses.cancel(endless.id).status == "cancelled"
    pair.running[0].wait("cancel", mark)
    assert first.responses.retrieve(endless.id).status == "cancelled"


def test_the_events_of_a_stream_in_the_background_can_be_read_again(pair: Pair) -> None:
    first, second = pair.client(0), pair.client(1)
    mark = pair.running[0].mark()
    stream = first.responses.create(model="alpha", input=play("again and again", hold=5), background=True, stream=True)
    made = next(iter(stream)).response  # type: ignore[union-attr]
    pair.running[0].wait("held", mark)
    stream.close()  # the client leaves, and it goes on
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(lambda: [each.type for each in second.responses.retrieve(made.id, stream=True)])
        pair.running[0].tell_unit("go")
        types = follower.result(PATIENCE)
    assert (types[0], types[-1]) == ("response.created", "response.completed")
    rest = list(second.responses.retrieve(made.id, stream=True, starting_after=len(types) - 3))
    assert [each.type for each in rest] == types[-2:]
    # One that is cancelled ends for those who follow it.
    mark = pair.running[0].mark()
    stream = first.responses.create(model="alpha", input=play("cut short", hold=5), background=True, stream=True)
    made = next(iter(stream)).response  # type: ignore[union-attr]
    pair.running[0].wait("held", mark)
    assert second.responses.cancel(made.id).status == "cancelled"
    assert "response.completed" not in [each.type for each in stream]


def test_what_a_killed_gateway_was_making_has_failed(pair: Pair) -> None:
    mark = pair.running[0].mark()
    made = pair.client(1).responses.create(model="alpha", input=play("lost with it", hold=2), background=True)
    pair.running[0].wait("held", mark)
    pair.start_again(1)
    read = pair.client(0).responses.retrieve(made.id)
    assert read.status == "failed"
    assert read.error is not None
    assert read.error.message == "the server ended before this response was complete"


def test_paths_of_responses_are_told_apart(pair: Pair) -> None:
    http = http_of(pair.client(0))
    key = {"Authorization": "Bearer operator"}
    answers = {
        (method, path): http.request(method, f"http://gateway{path}", headers=key).status_code
        for method, path in [
            ("GET", "/v1/responses/resp_none"),
            ("POST", "/v1/responses/resp_none"),
            ("GET", "/v1/responses/resp_none/cancel"),
            ("POST", "/v1/responses/resp_none/else"),
            ("GET", "/models/alpha/v1/responses/resp_none"),
        ]
    }
    assert [*answers.values()] == [404, 405, 405, 404, 404]
    assert http.get("http://gateway/v1/responses/resp_none").status_code == 401


def test_a_fleet_that_keeps_none_says_so(client: openai.OpenAI) -> None:
    keeps_none = "this server keeps none; set gateway.responses in its fleet file"
    with pytest.raises(openai.NotFoundError, match=keeps_none):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match=keeps_none):
        client.responses.create(model="alpha", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match=r"set gateway\.responses in the fleet file of this server"):
        client.responses.create(model="alpha", input="x", background=True)


def load(client: openai.OpenAI) -> int:
    answer = http_of(client).get("http://gateway/load", headers={"Authorization": "Bearer operator"})
    in_service = answer.json()["server_load"]
    assert isinstance(in_service, int)
    return in_service


def http_of(client: openai.OpenAI) -> httpx.Client:
    return client._client
