"""Whatever a client sends, it gets a 4xx in OpenAI's shape, and nobody else notices."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.gateway.rig import Running
from tests.support.patience import PATIENCE

JSON = {"content-type": "application/json"}
HI: dict[str, Any] = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}
GO: dict[str, Any] = {"model": "alpha", "prompt": "hi"}

NO_JSON = [
    b"",
    b" ",
    b"{",
    b"nonsense",
    b'{"model": "alpha", "prompt": "hi"',
    b'{"model": "alpha", "prompt": "hi"} trailing',
    b"{'model': 'alpha'}",
    b'{"model": "alpha", "prompt": "hi", "temperature": NaN}',
    b'{"model": "alpha", "prompt": "hi", "temperature": Infinity}',
    b'{"model": "alpha", "prompt": "hi", "temperature": -Infinity}',
    b'{"model": "alpha", "prompt": "\xff\xfe"}',
    b'{"model": "\xff", "prompt": "hi"}',
    b'{"model": "alpha", "prompt": "\\ud800"}',
    b'\xef\xbb\xbf{"model": "alpha", "prompt": "hi"}',
    b"\x00\x01\x02",
    b"model=alpha&prompt=hi",
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"model": "alpha", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
]

NO_OBJECT = [b"null", b"true", b"3", b'"alpha"', b"[]", b'[{"model": "alpha"}]']

NO_MODEL: list[dict[str, Any]] = [
    {"prompt": "hi"},
    {"model": None, "prompt": "hi"},
    {"model": 3, "prompt": "hi"},
    {"model": ["alpha"], "prompt": "hi"},
    {"model": {"name": "alpha"}, "prompt": "hi"},
]

UNKNOWN_MODELS = ["", "Alpha", "alpha ", "gpt-4", "alpha/v1", "../alpha", "x" * 10_000, "\u0000", "模型"]


def each_of(wrong: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Each field with each of its values."""
    return [{field: value} for field, values in wrong.items() for value in values]


COMPLETIONS: list[dict[str, Any]] = [
    *each_of(
        {
            "prompt": [None, 3, {}, [], [[]], ["a", 3], [1.5], [-1], [10**9], [2**70], "x" * 2000, [7] * 1024],
            "max_tokens": [-1, 0, 1.5, "many", 5000, 2**70],
            "temperature": [-1, "warm", 10**400, []],
            "top_p": [-0.1, 1.1, 0],
            "top_k": [-5, "all"],
            "min_p": [2],
            "n": [0, -1, 10_000, "two"],
            "logprobs": [-5, 10_000, "yes please"],
            "prompt_logprobs": [-3],
            "stop": [3, [3], [""], {"a": 1}],
            "stop_token_ids": [["a"]],
            "seed": ["lucky", 2**70],
            "presence_penalty": [9],
            "frequency_penalty": ["none"],
            "repetition_penalty": [0, -1],
            "logit_bias": [{"5": "a"}, {"99999999": 1}, {"a": 1}, [1]],
            "stream": ["perhaps"],
            "stream_options": [3],
            "min_tokens": [-1],
            "bad_words": [[3]],
            "echo": ["loud"],
            "suffix": ["end"],
            "truncate_prompt_tokens": [-5, 10**6],
            "allowed_token_ids": [[], [10**6]],
            "response_format": [{"type": "poem"}, {"type": "json_schema"}],
            "structured_outputs": [
                {"json": {"type": "nonsense"}},
                {"regex": "(((("},
                {"grammar": "not a grammar ::"},
                {"choice": []},
                True,
                0,
                "",
                ["regex"],
                {"json": {}, "regex": "a"},
            ],
            "prompt_embeds": ["AAAA", "not base64 %%%"],
            "priority": ["high"],
            "request_id": [7],
            "cache_salt": [""],
            "kv_transfer_params": ["x"],
        }
    ),
    {"prompt": "", "max_tokens": 5},
    {"prompt_logprobs": 1, "stream": True},
    {"stream": False, "stream_options": {"include_usage": True}},
    {"min_tokens": 10, "max_tokens": 5},
    {"lora": "x", "model": "lora-of-alpha"},
]

CHATS: list[dict[str, Any]] = [
    *each_of(
        {
            "messages": [
                None,
                [],
                "hi",
                [3],
                [{}],
                [{"role": 3, "content": "hi"}],
                [{"role": "user", "content": 3}],
                [{"role": "user", "content": [{"type": "text"}]}],
                [{"role": "user", "content": [{"type": "smell", "smell": "x"}]}],
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}],
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}]}],
                [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}],
                [{"role": "user", "content": "x" * 5000}],
            ],
            "user": [3],
            "max_tokens": [-1, 5000],
            "max_completion_tokens": [0, "x"],
            "temperature": [-0.5],
            "top_p": [7],
            "n": [0, 10_000],
            "logprobs": ["x"],
            "top_logprobs": [3],
            "tools": [3, [3], [{"type": "function"}], [{"type": "function", "function": {"name": 3}}]],
            "tool_choice": ["required", {"type": "function", "function": {"name": "nobody"}}],
            "response_format": [
                "json",
                {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}},
                {"type": "json_schema", "json_schema": "x"},
            ],
            "chat_template": ["{{ 1 / 0 }}", "{% for"],
            "chat_template_kwargs": [3],
            "documents": ["x"],
            "mm_processor_kwargs": [{"a": 1}],
            "stop": [["a", None]],
        }
    ),
    {"logprobs": True, "top_logprobs": -5},
    {"logprobs": True, "top_logprobs": 10_000},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "sometimes"},
    {"stream": True, "stream_options": {"include_usage": "x"}},
    {"add_generation_prompt": True, "continue_final_message": True},
]

TOKENIZE: list[dict[str, Any]] = [
    {},
    {"prompt": 3},
    {"prompt": ["a"]},
    {"messages": 3},
    {"messages": []},
    {"prompt": "a", "add_special_tokens": "x"},
    # More than twice as many tokens as the context has.
    {"prompt": "x" * 100_000},
    {"prompt": "x" * 100_000, "return_token_strs": True},
    {"messages": [{"role": "user", "content": "x" * 100_000}]},
    {"messages": [{"role": "user", "content": "x"}] * 3000},
]

DETOKENIZE: list[dict[str, Any]] = [
    {},
    {"tokens": "abc"},
    {"tokens": [-1]},
    {"tokens": [2**70]},
    {"tokens": ["a"]},
    {"tokens": [9] * 50_000},
]


@pytest.fixture(scope="module", autouse=True)
def bystanders(gateway: Running) -> Iterator[None]:
    """Good requests throughout; every one of them must be answered as if nothing else went on."""
    stop = False
    begun = len(gateway.log)

    def ask(number: int) -> int:
        served = 0
        with httpx.Client(base_url=gateway.url, timeout=PATIENCE) as http:
            while not stop:
                say = f"{number} undisturbed {served}"
                body = {
                    "model": ("alpha", "beta")[served % 2],
                    "prompt": "PLAY " + json.dumps({"say": say}),
                    "max_tokens": 99,
                }
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"] == say
                served += 1
        return served

    with ThreadPoolExecutor(2) as pool:
        asking: list[Future[int]] = [pool.submit(ask, n) for n in range(2)]
        try:
            yield
        finally:
            stop = True
        for each in asking:
            assert each.result() > 0
    log = gateway.log[begun:]
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]


def refused(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    """The error of an answer that must be one, in OpenAI's shape."""
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:500])
    assert not statuses or answer.status_code in statuses, (answer.status_code, answer.text[:500])
    error = answer.json()["error"]
    assert isinstance(error, dict)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(error["message"]) < 20_000
    assert isinstance(error["type"], str)
    assert error["code"] == answer.status_code
    assert "Traceback" not in error["message"]
    return error


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:60] + "..."


@pytest.mark.parametrize("path", ["/v1/completions", "/models/alpha/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("body", NO_JSON, ids=short)
def test_no_json(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body, headers=JSON), 400)


@pytest.mark.parametrize("body", NO_OBJECT, ids=short)
def test_no_object(http: httpx.Client, body: bytes) -> None:
    error = refused(http.post("/v1/chat/completions", content=body, headers=JSON), 400)
    assert "object" in error["message"]


@pytest.mark.parametrize("body", NO_MODEL, ids=short)
def test_no_model(http: httpx.Client, body: dict[str, Any]) -> None:
    error = refused(http.post("/v1/completions", json=body), 400)
    assert error["param"] == "model"


@pytest.mark.parametrize("name", UNKNOWN_MODELS, ids=short)
def test_unknown_model(http: httpx.Client, name: str) -> None:
    error = refused(http.post("/v1/completions", json={"model": name, "prompt": "hi"}), 404)
    assert "alpha, beta" in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_wrong_content_type(http: httpx.Client, content_type: str) -> None:
    answer = http.post("/v1/completions", content=json.dumps(GO), headers={"content-type": content_type})
    refused(answer, 400, 415)


@pytest.mark.parametrize("change", COMPLETIONS, ids=short)
def test_completions(http: httpx.Client, change: dict[str, Any]) -> None:
    refused(http.post("/v1/completions", content=json.dumps({**GO, **change}), headers=JSON))


@pytest.mark.parametrize("change", CHATS, ids=short)
def test_chats(http: httpx.Client, change: dict[str, Any]) -> None:
    refused(http.post("/v1/chat/completions", content=json.dumps({**HI, **change}), headers=JSON))


MEDIA: list[tuple[str, dict[str, Any]]] = [
    ("image", {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}),
    ("image", {"image_url": "http://127.0.0.1:9/x"}),
    ("image", {"type": "input_image", "image_url": "data:image/png;base64,"}),
    ("image", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}),
    ("audio", {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}),
    ("video", {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/x"}}),
]


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")]
)
def test_media_are_refused_with_the_reason(http: httpx.Client, path: str, field: str) -> None:
    for kind, part in MEDIA:
        message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}
        answer = http.post(path, json={"model": "alpha", "max_tokens": 9, field: [message]})
        if path == "/v1/messages":
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        else:
            error = refused(answer, 400)
            assert (error["type"], error["param"]) == ("BadRequestError", field)
        assert f"{field}[0].content[1] is " in error["message"]
        assert f"text only here, also those that could take {kind}" in error["message"]


def test_text_that_speaks_of_media_is_served(http: httpx.Client) -> None:
    said = {"say": '"image_url" and "input_audio"'}
    part = {"type": "text", "text": f"PLAY {json.dumps(said)}"}
    body = {**HI, "messages": [{"role": "user", "content": [part]}], "metadata": {"image": "video_url"}}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("change", TOKENIZE, ids=short)
def test_tokenize(http: httpx.Client, change: dict[str, Any]) -> None:
    refused(http.post("/tokenize", json={"model": "alpha", **change}))


@pytest.mark.parametrize("change", DETOKENIZE, ids=short)
def test_detokenize(http: httpx.Client, change: dict[str, Any]) -> None:
    refused(http.post("/detokenize", content=json.dumps({"model": "alpha", **change}), headers=JSON))


def test_unknown_fields_are_taken_as_vllm_takes_them(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**GO, "prompt": 'PLAY {"say": "fine"}', "mood": "good", "x": [1]})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "fine"


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/nothing", "/v1/completions/", "/docs", "/metrics/x", "/models", "/models/", "/v1/../health"],
)
def test_no_such_path(http: httpx.Client, path: str) -> None:
    refused(http.post(path, json=GO), 404, 405)


@pytest.mark.parametrize(
    "path",
    ["/load", "/invocations", "/ping", "/scale_elastic_ep", "/start_profile", "/sleep", "/reset_prefix_cache",
     "/inference/v1/generate", "/v1/load_lora_adapter", "/collective_rpc", "/openapi.json", "/health"],
)  # fmt: skip
def test_vllms_own_administration_is_not_passed_on(http: httpx.Client, path: str) -> None:
    refused(http.post(f"/models/alpha{path}", json=GO), 404)
    refused(http.get(f"/models/alpha{path}"), 404)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_wrong_method(http: httpx.Client, method: str) -> None:
    answer = http.request(method, "/v1/completions")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("size", [200_001, 5_000_000])
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_huge_body(http: httpx.Client, size: int, announced: bool) -> None:
    body = json.dumps({**GO, "user": "x" * size}).encode()
    chunks = (body[i : i + 65536] for i in range(0, len(body), 65536))
    error = refused(http.post("/v1/completions", content=body if announced else chunks, headers=JSON), 413)
    assert "200000" in error["message"]


def test_body_far_too_large_is_refused_unread(gateway: Running) -> None:
    with socket.create_connection(("127.0.0.1", gateway.fleet.gateway.port), timeout=PATIENCE) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n{")
        answer = b""
        while chunk := raw.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=short,
)
def test_no_http(gateway: Running, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", gateway.fleet.gateway.port), timeout=PATIENCE) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert not answer or answer.startswith(b"HTTP/1.1 4")


def test_a_request_that_never_comes_is_let_go(gateway: Running) -> None:
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", gateway.fleet.gateway.port), timeout=PATIENCE) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")


@pytest.mark.parametrize(
    "headers",
    [{"x-request-id": "x" * 4000}, {"x-request-id": "a/b c\"#'"}, {"authorization": "Bearer " + "x" * 4000}],
    ids=short,
)
def test_odd_headers_are_taken(http: httpx.Client, headers: dict[str, str]) -> None:
    body = {**GO, "prompt": 'PLAY {"say": "fine", "lose": 2}'}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "fine"
    # What cannot stand in a log gets another name.
    assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])


def test_the_same_request_id_twice_at_once(http: httpx.Client) -> None:
    def ask(number: int) -> str:
        body = {**GO, "prompt": "PLAY " + json.dumps({"say": f"mine {number}"})}
        answer = http.post("/v1/completions", json=body, headers={"x-request-id": "the-same"})
        text = answer.json()["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(16))) == [f"mine {n}" for n in range(16)]


@pytest.mark.parametrize(
    "change",
    [{"best_of": "two"}, {"priority": 1}, {"logit_bias": {"5": 1000}}, {"messages": [{"role": "user"}]}],
    ids=short,
)
def test_what_vllm_lets_pass_is_served(http: httpx.Client, change: dict[str, Any]) -> None:
    answer = http.post("/v1/chat/completions", json={**HI, **change})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "ok"
