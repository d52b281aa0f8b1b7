"""Reading a request's body once: bounded, checked to be JSON, and asked for its model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from muxserve.gateway.http.errors import CLOSE, Message, Receive, RequestError, Scope, retry_after
from muxserve.gateway.http.http_request import HttpRequest

Order = TypeVar("Order", bound=msgspec.Struct)

# How much memory the bodies of requests may take together before the requests are admitted.
#
# Each is bounded in size, and each model in how many it lets wait; but clients are not bounded in number, and what they
# send is in memory before anybody knows which model it is for.

MEMORY_BYTES = 256 << 20
# Bodies up to this size have a part of it to themselves, so that large ones cannot keep everybody out.
SMALL_BYTES = 64 << 10
FOR_SMALL = 0.25


class BodyMemory:
    """What the bodies of requests take that are not admitted yet: those that are still coming and those that wait.

    Args:
        largest: bytes of the largest body taken. There is room for 16 of them, or `MEMORY_BYTES` if that is more.
    """

    def __init__(self, largest: int) -> None:
        self.most = max(MEMORY_BYTES, 16 * largest)
        self.used = 0

    @contextmanager
    def claim(self) -> Iterator[BodyClaim]:
        """One request's part, which ends with the block at the latest."""
        claim = BodyClaim(self)
        try:
            yield claim
        finally:
            claim.release()


class BodyClaim:
    """Bytes of one body."""

    __slots__ = ("_memory", "size")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.size = 0

    def grow(self, size: int) -> bool:
        """The body has `size` bytes by now; whether there is room for them. If there is not, it counts no more."""
        memory = self._memory
        most = memory.most if size <= SMALL_BYTES else memory.most * (1.0 - FOR_SMALL)
        used = memory.used + size - self.size
        if used > most:
            self.release()
            return False
        memory.used, self.size = used, size
        return True

    def release(self) -> None:
        """The body counts no more."""
        self._memory.used -= self.size
        self.size = 0


# A client that gets "too large" while it still sends may never read it. So this much more is read and thrown away.
DISCARD_BYTES = 16 << 20
# A client that sends no more of its body for so long will not; nor will one that, after so long, is slower than this.
STALL_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 1024


def latest(begun: float, now: float, size: int) -> float:
    """When the next part of a body must have come, of which `size` bytes have come since `begun`."""
    return min(now, begun + size / SLOWEST_BYTES_PER_SECOND) + STALL_SECONDS


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


class RequestFields(msgspec.Struct):
    """The fields of a body that are looked at here, whatever the route; msgspec checks the syntax of the others and
    keeps none of it. All follow the request classes of vLLM 0.32 (`vllm.entrypoints`)."""

    # The one that chooses the model, and one whose type vLLM takes for granted.
    model: str | None = None
    structured_outputs: dict[str, msgspec.Raw] | None = None
    # Tokens in place of a text; `prompt` and `input` may have them as well.
    tokens: msgspec.Raw = msgspec.Raw()
    # Those that ask for several answers.
    n: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()
    images: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    items: msgspec.Raw = msgspec.Raw()
    data_1: msgspec.Raw = msgspec.Raw()
    data_2: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(RequestFields)
# Types of a message's parts that are no text, as chats, responses and Anthropic's messages have them.
_MEDIA = re.compile(r"(?:input_)?(image|audio|video)(?:_\w+)?")
_MAY_HAVE_MEDIA = re.compile(rb'"(?:input_)?(?:image|audio|video)(?:_\w+)?"')
# Objects and lists in a body: vLLM checks each of them before anything else happens, in the event loop. In two messages
# of a chat there are two of them; a thousand conversations, or half a million tokens of them, have less.
MOST_PARTS = 16384
# A message of a chat has eight quotes.
_FIRST_QUOTES = 10 * MOST_PARTS
_TOO_DEEP = "the request body is nested too deeply"
_TEXT_ONLY = "models are served for text only here, also those that could take {}; remove it"
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
_DATA_ONLY = (
    "this server fetches nothing, so an image must come with the request, as a URL that begins with "
    "data:image/png;base64, (or another type of image)"
)
# Fields that would change how images are read.
_ABOUT_MEDIA = ("mm_processor_kwargs", "media_io_kwargs")


async def read_body(receive: Receive, headers: list[tuple[bytes, bytes]], limit: int, claim: BodyClaim) -> bytes:
    """The whole body, for which `claim` stands from then on.

    Raises:
        RequestError: it is larger than `limit` bytes (413), stopped coming (408), or there is no room for it at the
            moment (503).
        ClientGoneError: the client closed the connection.
    """
    announced = 0
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            announced = int(value)
    chunks: list[bytes] = []
    size = 0
    more = room = True
    clock = asyncio.get_running_loop().time
    begun = clock()
    while more:
        if max(size, announced) > limit + DISCARD_BYTES:
            break
        try:
            async with asyncio.timeout_at(latest(begun, clock(), size)):
                message = await receive()
        except TimeoutError:
            raise RequestError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request body stopped after {size} bytes, or came too slowly: nothing may take "
                f"{STALL_SECONDS:g} s, and all of it that and a second for each {SLOWEST_BYTES_PER_SECOND} bytes",
                headers=[CLOSE],
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        room = room and (size > limit or claim.grow(size))
        if size > limit or not room:
            chunks.clear()
            claim.release()
        else:
            chunks.append(chunk)
    if max(size, announced) > limit:
        raise RequestError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request body has {'more than ' if more else ''}{max(size, announced)} bytes; "
            f"this server takes at most {limit}",
            headers=[CLOSE],
        )
    if not room:
        raise RequestError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "this server holds as many request bodies as it has memory for; try again in a moment",
            headers=[CLOSE, retry_after(1)],
        )
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_order(receive: Receive, scope: Scope, memory: BodyMemory, kind: type[Order], limit: int) -> Order:
    """The body of a request of the gateway's own, of at most `limit` bytes.

    Raises:
        RequestError: it cannot be read, or is no such order (400).
        ClientGoneError: the client closed the connection.
    """
    with memory.claim() as claim:
        body = await read_body(receive, scope["headers"], limit, claim)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"{scope['path']}: {error}") from None


def asked_by(body: bytes) -> RequestFields:
    """What a JSON body asks for, as far as that is looked at here.

    Raises:
        RequestError: the body is no JSON object, one of these fields is of a wrong type, or it has too many parts
            (400).
    """
    try:
        if not body.isascii():
            str(body, "utf-8")  # msgspec does not look into strings that it skips
        asked = _decoder.decode(body)
    except msgspec.ValidationError as error:
        if "$.model" in str(error):
            raise RequestError(HTTPStatus.BAD_REQUEST, "'model' must be a string", param="model") from None
        if "$.structured_outputs" in str(error):
            raise RequestError(
                HTTPStatus.BAD_REQUEST, "'structured_outputs' must be an object", param="structured_outputs"
            ) from None
        raise RequestError(HTTPStatus.BAD_REQUEST, "the request body must be a JSON object") from None
    except UnicodeDecodeError as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the request body is not UTF-8: {error.reason}") from None
    except msgspec.DecodeError as error:
        reason = "it is empty" if not body.strip() else str(error)
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the request body is not valid JSON: {reason}") from None
    except RecursionError:
        raise RequestError(HTTPStatus.BAD_REQUEST, _TOO_DEEP) from None
    parts = _parts_of(body)
    if parts > MOST_PARTS:
        raise RequestError(
            HTTPStatus.BAD_REQUEST,
            f"the request body has more than {MOST_PARTS} objects and lists, which is the most that is taken",
        )
    return asked


def _parts_of(body: bytes) -> int:
    """Objects and lists in a JSON body, as far as there can be too many."""
    parts = body.count(b"{") + body.count(b"[")
    if parts <= MOST_PARTS:
        return parts
    # Some of them are in strings, of which every quote begins or ends one when the escaped ones are gone.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A body that has far too many of them is not looked at to its end.
    for quotes in (_FIRST_QUOTES, -1):
        pieces = bare.split(b'"', quotes)
        if quotes > 0:
            pieces = pieces[:-1]
        outside = b"".join(pieces[::2])
        parts = outside.count(b"{") + outside.count(b"[")
        if parts > MOST_PARTS:
            break
    return parts


_NUMBERS = re.compile(rb"\s*\[[\s\[]*-?\d")


def check_tokens(asked: RequestFields, most: int) -> None:
    """Refuse lists of tokens of which one has more than `most`, before anything makes numbers of them.

    Raises:
        RequestError: there is such a list (400).
    """
    for field in ("tokens", "prompt", "input"):
        value = memoryview(getattr(asked, field))
        if len(value) <= 2 * most:  # each takes two characters
            continue
        text = bytes(value)
        if _NUMBERS.match(text) and text.count(b",") >= most * max(1, text.count(b"[") - 1):
            raise RequestError(
                HTTPStatus.BAD_REQUEST,
                f"{field!r} has a list of more than {most} tokens, twice what the model can read; send parts of it",
                param=field,
            )


def check_media(body: bytes, sees_images: bool) -> None:
    """Let nothing in that the model cannot take: images only where it `sees_images`, as data URLs, and nothing that
    would have the server fetch something or believe what an image is.

    Args:
        body: JSON, as `asked_by` has found.

    Raises:
        RequestError: there is something else in it (400).
    """
    # Names can be written with escapes; where there is more to see than text, nothing may go by unseen.
    if not sees_images and not _MAY_HAVE_MEDIA.search(body):
        return
    try:
        _check_media(msgspec.json.decode(body), sees_images)
    except RecursionError:
        raise RequestError(HTTPStatus.BAD_REQUEST, _TOO_DEEP) from None


def _check_media(asked: dict[str, Any], sees_images: bool) -> None:
    found = False
    for field in ("messages", "input"):
        for place, part in _parts(asked.get(field), field):
            # Its `type` may be left out where another key says what it is.
            named = [each for each in (part.get("type"), *part) if isinstance(each, str)]
            kind = next((match for each in named if (match := _MEDIA.fullmatch(each))), None)
            if kind is None:
                continue
            reason = _why_not(part, kind[0], kind[1]) if sees_images else _TEXT_ONLY.format(kind[1])
            if reason:
                raise RequestError(HTTPStatus.BAD_REQUEST, f"{place} is {kind[0]}: {reason}", param=field)
            found = True
    for field in _ABOUT_MEDIA if found else ():
        if asked.get(field):
            raise RequestError(HTTPStatus.BAD_REQUEST, f"{field!r} is not served; remove it", param=field)


def _parts(value: object, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of messages, also of several conversations and of what tools have answered, and where they are."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _parts(each, f"{place}[{index}]")
    elif isinstance(value, dict):
        if "role" not in value:
            yield place, value
        for key in ("content", "output"):
            if isinstance(value.get(key), list):
                yield from _parts(value[key], f"{place}.{key}")


def _why_not(part: dict[str, Any], name: str, kind: str) -> str:
    """Why a part of a message, an image perhaps, is not taken; empty if it is."""
    if kind != "image":
        return f"this model takes text and images, no {kind}; remove it"
    if part.get("uuid") is not None:
        return "'uuid' is not served, since images are known by what is in them; remove it"
    source = part.get("source")
    if isinstance(source, dict):  # Anthropic's
        return "" if source.get("type") == "base64" else _DATA_ONLY
    if name not in ("image_url", "input_image"):
        return "an image is given by its `image_url`"
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    return "" if isinstance(url, str) and _DATA_URL.match(url) else _DATA_ONLY


class BodyReplay:
    """An ASGI `receive` that gives `body`, already read, and then what comes after it.

    Args:
        receive: the connection's own.
        body: the whole body.
        http: its `disconnected` is set when the client closes the connection.
    """

    __slots__ = ("_after", "_body", "_receive", "http")

    def __init__(self, receive: Receive, body: bytes, http: HttpRequest) -> None:
        self._receive = receive
        self._body: bytes | None = body
        self.http = http
        self._after: asyncio.Task[Message] | None = None

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await (asyncio.shield(self._after) if self._after is not None else self._receive())
        if message["type"] == "http.disconnect":
            self.http.disconnected = True
        return message

    def again(self, body: bytes) -> None:
        """Give `body` to whoever asks next: another one serves the request."""
        self._body = body

    def watch(self) -> asyncio.Task[Message]:
        """A task that ends when the client closes the connection; for whoever has to wait before the body is used."""
        if self._after is None:
            self._after = asyncio.ensure_future(self._wait_for_disconnect())
        return self._after

    def unwatch(self) -> None:
        """End the task of `watch`, if there is one."""
        if self._after is not None:
            self._after.cancel()

    async def _wait_for_disconnect(self) -> Message:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.http.disconnected = True
                return message
