"""What a request may constrain its answer with: refused with a reason where it is too much or makes no sense, and
nobody else waits for it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.gateway.conftest import COMPILE_SECONDS
from tests.gateway.playing import asking, play
from tests.gateway.rig import Running
from tests.support.patience import PATIENCE

# A machine that does other things may take longer for what is done at once.
TRIES = 10


def optional_properties(count: int, name: str = "p") -> dict[str, Any]:
    """A small schema that compiles to rules of its square."""
    return {"type": "object", "properties": {f"{name}{i}": {} for i in range(count)}}


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"json": {"$ref": "#"}}, "allows no token"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "no token"),
    ({"json": {"$ref": "#/$defs/nowhere"}}, "nowhere"),
    ({"json": {"type": "string", "pattern": "\\p"}}, "regex"),
    ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "nsatisfiable"),
    ({"json": {"enum": []}}, "nsatisfiable"),
    ({"json": {"type": 5}}, "type"),
    ({"json": "{"}, "JSON"),
    ({"regex": "\\p"}, "regex"),
    ({"regex": "(((("}, "regex"),
    ({"grammar": "root ::= root"}, "allows no token"),
    ({"grammar": "root ::= a\na ::= b\nb ::= a"}, "allows no token"),
    ({"grammar": "root ::= nowhere"}, "nowhere"),
    ({"grammar": " "}, "empty"),
    ({"choice": []}, "empty"),
    ({"json_object": False}, "json_object"),
    ({"structural_tag": '{"type": "structural_tag", "format": {"type": "poem"}}'}, "structural"),
]
TOO_LARGE: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "string", "maxLength": 10**9}}, "repetitions written out"),
    ({"json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}}, "repetitions written out"),
    ({"json": {"enum": [f"v{i}" for i in range(9000)]}}, "bytes; this server takes at most"),
    ({"regex": "|".join("a" * 50_000)}, "bytes; this server takes at most"),
    ({"regex": "((a{1000}){1000}){1000}"}, "repetitions written out"),
    ({"choice": [f"c{i}" for i in range(15_000)]}, "bytes; this server takes at most"),
    ({"choice": ["x" * 100_000]}, "bytes; this server takes at most"),
    ({"grammar": "root ::= " + " | ".join(f'"r{i}"' for i in range(15_000))}, "bytes; this server takes at most"),
    ({"regex": "(" * 30_000}, "nested too deeply"),
]
NOTHING_LEFT: list[dict[str, Any]] = [
    {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [40]},
    {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["y"]},
    {"structured_outputs": {"regex": ""}, "min_tokens": 3, "max_tokens": 9},
]


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "alpha", "prompt": play("yes"), **fields})


def refused(answer: httpx.Response) -> str:
    """The message of a 400 in OpenAI's shape."""
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, "structured_outputs")
    assert len(error["message"]) < 1000
    message: str = error["message"]
    return message


@pytest.mark.parametrize(("structured", "says"), INVALID)
def test_what_makes_no_sense_is_refused(http: httpx.Client, structured: dict[str, Any], says: str) -> None:
    assert says in refused(ask(http, structured_outputs=structured))


@pytest.mark.parametrize(("structured", "words"), TOO_LARGE)
def test_what_is_too_large_is_refused(http: httpx.Client, structured: dict[str, Any], words: str) -> None:
    assert words in refused(ask(http, structured_outputs=structured))


@pytest.mark.parametrize("fields", NOTHING_LEFT)
def test_constraints_that_leave_no_first_token_are_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert "no token can be the first" in refused(ask(http, **fields))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_refused_alike(http: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"model": "alpha", "stream": True, "structured_outputs": {"regex": "\\p"}}
    said = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    refused(http.post(path, json=body | said))


def test_schemas_of_chats_tools_and_responses_are_looked_at_too(client: openai.OpenAI) -> None:
    endless: dict[str, object] = {"type": "string", "maxLength": 10**9}
    message: Any = [{"role": "user", "content": play("yes")}]
    with pytest.raises(openai.BadRequestError, match="repetitions written out"):
        client.chat.completions.create(
            model="alpha",
            messages=message,
            response_format={"type": "json_schema", "json_schema": {"name": "endless", "schema": endless}},
        )
    tool: Any = {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"x": endless}}},
    }
    with pytest.raises(openai.BadRequestError, match="repetitions written out"):
        client.chat.completions.create(model="beta", messages=message, tools=[tool], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="repetitions written out"):
        client.responses.create(
            model="alpha",
            input=play("yes"),
            text={"format": {"type": "json_schema", "name": "endless", "schema": endless}},
        )


def compiler(gateway: Running) -> psutil.Process:
    """The gateway's grammar compiler."""
    every = named("grammar compiler", below(gateway))  # what it forks for a grammar has its name
    (found,) = [each for each, parent in every.items() if parent not in {other.pid for other in every}]
    return found


def below(gateway: Running) -> list[psutil.Process]:
    return psutil.Process(gateway.pid).children(recursive=True)


def beside(gateway: Running) -> list[psutil.Process]:
    """What belongs to the gateway, also forked by one that has died; and to other gateways of these tests."""
    group, found = os.getpgid(gateway.pid), []
    for each in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(each.pid) == group:
                found.append(each)
    return found


def named(title: str, among: list[psutil.Process]) -> dict[psutil.Process, int]:
    """Those of that name, and who is their parent. Some end while they are looked at."""
    found = {}
    for each in among:
        with contextlib.suppress(psutil.NoSuchProcess):
            if f"muxserve {title}" in " ".join(each.cmdline()):
                found[each] = each.ppid()
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_slow_ones_are_ended_and_quick_ones_overtake_them(http: httpx.Client, gateway: Running) -> None:
    with ThreadPoolExecutor(3) as pool:
        slow = [
            pool.submit(ask, http, structured_outputs={"json": optional_properties(3000, f"name{i}")}) for i in range(3)
        ]
        for i in range(5):
            assert ask(http, structured_outputs={"choice": ["yes", f"no {i}"]}).status_code == 200
        assert not all(each.done() for each in slow)
        for each in slow:
            message = refused(each.result(PATIENCE))
            assert "s of CPU time" in message or "too much memory" in message
    assert compiler(gateway).children() == []

    def said_again() -> bool:
        began = time.monotonic()
        refused(ask(http, structured_outputs={"json": optional_properties(3000, "name0")}))
        return time.monotonic() - began < COMPILE_SECONDS

    assert any(said_again() for _ in range(TRIES)), "what was said of it was forgotten"


@pytest.mark.parametrize("stream", [False, True])
def test_compiling_ends_when_the_client_leaves(gateway: Running, stream: bool) -> None:
    process = compiler(gateway)

    def ends(number: int) -> bool:
        """Sooner than it would have ended by itself."""
        schema = optional_properties(3000, f"left{stream}{number}")
        body = {"model": "alpha", "prompt": "hi", "stream": stream, "structured_outputs": {"json": schema}}
        began = time.monotonic()
        with asking(gateway, body):
            until(lambda: bool(process.children()))
        until(lambda: not process.children())
        return time.monotonic() - began < COMPILE_SECONDS

    assert any(ends(number) for number in range(TRIES))


def test_a_compiler_that_dies_is_replaced_and_no_request_lost(http: httpx.Client, gateway: Running) -> None:
    assert ask(http, structured_outputs={"choice": ["yes", "before"]}).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, http, structured_outputs={"json": optional_properties(3000, "dies")})
        until(lambda: bool(compiler(gateway).children()))
        compiler(gateway).kill()
        assert ask(http, structured_outputs={"choice": ["yes", "anew"]}).status_code == 200
        refused(slow.result(PATIENCE))
    assert "the grammar compiler died" in gateway.log


def test_nothing_is_imported_again_when_compilers_and_what_forks_them_die(http: httpx.Client, gateway: Running) -> None:
    """Each in turn, several times; what one has forked lives on when it dies."""
    assert ask(http, structured_outputs={"choice": ["yes", "at first"]}).status_code == 200
    title = "spare grammar compiler"
    spares = [*named(title, below(gateway))]
    assert len(spares) == 2
    compiler(gateway).kill()
    # The next one has its own name when it answers; before, it has that of the nursery which forked it.
    assert ask(http, structured_outputs={"choice": ["yes", "another"]}).status_code == 200
    for number in range(4):
        before = {*named(title, beside(gateway))}
        spares.pop(0).kill()
        until(lambda before=before: {*named(title, beside(gateway))} - before)
        spares += {*named(title, beside(gateway))} - before
        assert ask(http, structured_outputs={"choice": ["yes", f"nursery {number}"]}).status_code == 200
    assert "importing vLLM" not in gateway.log


def test_refusals_of_a_unit_are_the_clients_to_know_in_responses_too(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="longer than the pool"):
        client.responses.create(model="alpha", input="hi", instructions=play("", refuse="longer than the pool"))
