"""Small HTTP client of the command line: JSON in, JSON or a stream of events out. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Iterator
from typing import Any

# By URL of an endpoint of this machine: the file with its certificate, whoever signed it and whatever names it has.
trusted: dict[str, str] = {}


class HTTPFailure(Exception):  # noqa: N818
    """No usable answer; the message says why. `status` is the answer's, 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def get_json(url: str, path: str, key: str | None = None, timeout: float = 10.0) -> tuple[int, Any]:
    """Status and JSON body of `GET url/path`.

    Raises:
        HTTPFailure: no connection, or an answer that is not JSON.
    """
    with _connection(url, timeout) as (connection, base):
        connection.request("GET", base + path, headers=_headers(key))
        return _answer(connection.getresponse(), url, path)


def send_json(
    url: str, method: str, path: str, body: object = None, key: str | None = None, timeout: float = 10.0
) -> tuple[int, Any]:
    """Status and JSON body of the answer to `method url/path`, with `body` as JSON if there is one.

    Raises:
        HTTPFailure: no connection, or an answer that is not JSON.
    """
    with _connection(url, timeout) as (connection, base):
        text = None if body is None else json.dumps(body)
        connection.request(method, base + path, text, {**_headers(key), "Content-Type": "application/json"})
        return _answer(connection.getresponse(), url, path)


def _answer(response: http.client.HTTPResponse, url: str, path: str) -> tuple[int, Any]:
    body = response.read()
    try:
        return response.status, json.loads(body)
    except ValueError:
        raise HTTPFailure(
            f"{url}{path} answered {response.status} with something that is not JSON; is this a MuxServe endpoint?"
        ) from None


def stream_chat(url: str, model: str, question: str, key: str | None = None, timeout: float = 60.0) -> Iterator[str]:
    """The pieces of one streamed chat answer.

    Raises:
        HTTPFailure: no connection, or the endpoint refused.
    """
    request = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 128,
    }
    with _connection(url, timeout) as (connection, base):
        headers = {**_headers(key), "Content-Type": "application/json"}
        connection.request("POST", f"{base}/v1/chat/completions", json.dumps(request), headers)
        for data in _events(connection.getresponse()):
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise HTTPFailure(str(event["error"].get("message", event["error"])))
            for choice in event.get("choices", ()):
                yield choice["delta"].get("content") or ""


def stream_events(url: str, path: str, key: str | None = None, timeout: float = 10.0) -> Iterator[str]:
    """The data of the server-sent events of `GET url/path`.

    Raises:
        HTTPFailure: no connection, the endpoint refused, or it said nothing for `timeout` seconds.
    """
    with _connection(url, timeout) as (connection, base):
        connection.request("GET", base + path, headers=_headers(key))
        yield from _events(connection.getresponse())


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    if response.status != 200:
        text = response.read(2000).decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = f"{response.status}: {text}"
        raise HTTPFailure(text, response.status)
    for line in response:
        if line.startswith(b"data: "):
            yield line.decode().strip().removeprefix("data: ")


@contextlib.contextmanager
def _connection(url: str, timeout: float) -> Iterator[tuple[http.client.HTTPConnection, str]]:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise HTTPFailure(f"{url!r} is no URL: {error}") from None
    try:
        port = parts.port
    except ValueError:
        raise HTTPFailure(f"{url!r} has no valid port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise HTTPFailure(f"{url!r} is not a URL such as http://127.0.0.1:8000")
    if parts.scheme == "https":
        context = _context(url)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, port, timeout=timeout, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, port, timeout=timeout)
    try:
        yield connection, parts.path.rstrip("/").removesuffix("/v1")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise HTTPFailure(f"no answer from {url}: {reason}") from None
    finally:
        connection.close()


def _context(url: str) -> ssl.SSLContext:
    """Which certificates are good at `url`."""
    own = trusted.get(url.rstrip("/"))
    if own is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(own)
    except (OSError, ssl.SSLError) as error:
        raise HTTPFailure(f"{url} cannot be asked: its certificate {own} cannot be read: {error}") from None
    return context


def _headers(key: str | None) -> dict[str, str]:
    if key and not (key.isascii() and key.isprintable()):
        raise HTTPFailure("the API key has characters that no key has: only printable ASCII can be sent")
    return {"Authorization": f"Bearer {key}"} if key else {}
