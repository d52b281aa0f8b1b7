"""The lines of batch files, as OpenAI's API has them: what is asked, and what has become of it. Pure: no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

# The routes that a batch may ask.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MOST_LINES = 50_000
MOST_ERRORS = 100
# Options that have no meaning where nobody waits for the answer.
_NOT_SERVED = ("stream", "background")
_OFF = frozenset({b"", b"false", b"null", b"0"})


class LineError(msgspec.Struct):
    """A mistake in an input file; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class AskedLine(msgspec.Struct):
    """A line of an input file. Its body stays JSON: in Python's objects it could take a hundred times its size."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class AskedBody(msgspec.Struct):
    """The body of a line, as far as it is looked at here."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()


class PlannedLine(msgspec.Struct, frozen=True):
    """A line that can be asked: its number from 0, where it is in the file, in bytes, and the model that it is for."""

    number: int
    custom_id: str
    offset: int
    length: int
    model: str


_decoder = msgspec.json.Decoder(AskedLine)
_bodies = msgspec.json.Decoder(AskedBody)


def planned_lines(
    lines: Iterable[bytes], endpoint: str, model_of: Callable[[str | None], str]
) -> tuple[list[PlannedLine], list[LineError]]:
    """The lines that a batch will ask, and every mistake (the first `MOST_ERRORS`); empty lines are none.

    Args:
        lines: those of the file, each with its end.
        endpoint: the route of the batch.
        model_of: the model that a request for this name is for. Raises ValueError with the reason if there is none.
    """
    found: list[PlannedLine] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    offset = 0
    for number, text in enumerate(lines, 1):
        length = len(text)
        if text.strip():
            problem = _problem(text, endpoint, seen, model_of)
            if isinstance(problem, LineError):
                problem.line = number
                errors.append(problem)
            else:
                custom_id, model = problem
                found.append(PlannedLine(len(found), custom_id, offset, length, model))
        offset += length
        if len(errors) >= MOST_ERRORS:
            break
        if len(found) > MOST_LINES:
            message = f"the file has more than {MOST_LINES:,} requests; send several files"
            return [], [LineError("too_many_requests", message)]
    if not found and not errors:
        errors.append(LineError("empty_file", "the file has no requests; each line is one, as JSON"))
    return found, errors


def _problem(
    text: bytes, endpoint: str, seen: set[str], model_of: Callable[[str | None], str]
) -> LineError | tuple[str, str]:
    try:
        if not text.isascii():
            str(text, "utf-8")  # msgspec does not look into strings that it skips
        line = _decoder.decode(text)
        body = _bodies.decode(line.body)
    except msgspec.ValidationError as error:
        return LineError("invalid_request", f"this line is no request of a batch: {error}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineError("invalid_json_line", f"this line is no JSON object: {error}")
    if line.custom_id in seen:
        message = f"custom_id {line.custom_id[:100]!r} is that of another line, too; each must have its own"
        return LineError("duplicate_custom_id", message, param="custom_id")
    seen.add(line.custom_id)
    if line.method != "POST":
        return LineError("invalid_method", f"method must be POST, not {line.method[:20]!r}", param="method")
    if line.url != endpoint:
        message = f"url must be {endpoint}, as the batch has it, not {line.url[:100]!r}"
        return LineError("mismatched_endpoint", message, param="url")
    for name in _NOT_SERVED:
        if bytes(getattr(body, name)) not in _OFF:
            message = f"body.{name} is not served in batches; remove it"
            return LineError("invalid_request", message, param=f"body.{name}")
    try:
        asked = msgspec.json.decode(bytes(body.model) or b"null", type=str | None)
    except msgspec.DecodeError:
        return LineError("invalid_request", "body.model must be a string", param="body.model")
    try:
        return line.custom_id, model_of(asked)
    except ValueError as error:
        return LineError("model_not_found", str(error), param="body.model")


def body_of(text: bytes) -> bytes:
    """The body of a line that can be asked."""
    return bytes(_decoder.decode(text).body)


def answered(name: str, custom_id: str, status: int, request_id: str, body: bytes) -> str:
    """A line of an output or error file for a request that was answered."""
    try:
        content: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        content = body.decode(errors="replace")
    response = {"status_code": status, "request_id": request_id, "body": content}
    return _line(name, custom_id, response, None)


def not_asked(name: str, custom_id: str, code: str, message: str) -> str:
    """A line of an error file for a request that has no answer."""
    return _line(name, custom_id, None, {"code": code, "message": message})


def _line(name: str, custom_id: str, response: object, error: object) -> str:
    line = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line).decode()
