"""Streams whose beginning is held back: errors get their own status, and comments show that somebody is there."""

from __future__ import annotations

import asyncio

from muxserve.gateway.http.early_errors import EarlyErrors
from muxserve.gateway.http.errors import Message

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
ERROR = b'data: {"error": {"message": "no", "code": 503}}\n\n'


def body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Client:
    def __init__(self) -> None:
        self.got: list[Message] = []
        self.send = EarlyErrors(self.take)

    async def take(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.got.append(dict(message))

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


def test_a_stream_that_waits_begins_with_comments() -> None:
    async def play() -> Client:
        client = Client()
        await client.send.comment("too early: nobody knows yet that it is a stream")
        await client.send(dict(START))
        await client.send.comment("waiting")
        await client.send.comment("waiting")
        await client.send(body(b"data: 1\n\n"))
        await client.send.comment("too late")
        await client.send(body(b"", more=False))
        return client

    client = asyncio.run(play())
    assert client.got[0]["status"] == 200
    assert client.text == b": waiting\n\n: waiting\n\ndata: 1\n\n"
    assert client.got[-1] == body(b"", more=False)


def test_an_error_has_its_own_status_only_before_the_first_comment() -> None:
    async def play(comments: bool) -> Client:
        client = Client()
        await client.send(dict(START))
        if comments:
            await client.send.comment("waiting")
        await client.send(body(ERROR))
        await client.send(body(b"", more=False))
        await client.send.comment("too late")
        return client

    assert asyncio.run(play(comments=False)).got[0]["status"] == 503
    client = asyncio.run(play(comments=True))
    assert client.got[0]["status"] == 200
    assert client.text == b": waiting\n\n" + ERROR


def test_comments_and_events_that_come_together_keep_their_order() -> None:
    async def play() -> Client:
        client = Client()
        await client.send(dict(START))
        await asyncio.gather(client.send.comment("waiting"), client.send(body(b"data: 1\n\n")))
        await client.send(body(b"", more=False))
        return client

    client = asyncio.run(play())
    assert [message["type"] for message in client.got].count("http.response.start") == 1
    assert client.got[0]["type"] == "http.response.start"
    assert client.text == b": waiting\n\ndata: 1\n\n"
