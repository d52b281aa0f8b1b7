"""Who asks at the same time shares one rendering, and who asks soon after it as well."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from muxserve.gateway.http.errors import Message
from muxserve.gateway.status.shared_answer import RenderedAnswer, SharedAnswer


class Renderings:
    """Counts them, and ends each when the test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> RenderedAnswer:
        self.begun += 1
        number = self.begun
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return RenderedAnswer(b"%d" % number)


async def test_fifty_readers_at_once_cost_one_rendering() -> None:
    render, clock = Renderings(), [0.0]
    shared = SharedAnswer(render, 1.0, clock=lambda: clock[0])
    readers = [asyncio.ensure_future(shared.get()) for _ in range(50)]
    while not render.begun:
        await asyncio.sleep(0)
    render.go.set()
    assert {answer.body for answer in await asyncio.gather(*readers)} == {b"1"}
    clock[0] = 0.99
    assert (await shared.get()).body == b"1"
    clock[0] = 1.0
    assert [answer.body for answer in await asyncio.gather(*(shared.get() for _ in range(50)))] == [b"2"] * 50
    assert render.begun == 2


async def test_who_wants_it_fresh_has_no_answer_of_before() -> None:
    render = Renderings()
    render.go.set()
    shared = SharedAnswer(render, 1.0, clock=lambda: 0.0)
    assert (await shared.get()).body == b"1"
    assert (await shared.get(fresh=True)).body == b"2"
    assert (await shared.get()).body == b"2"


async def test_nobody_gets_an_answer_about_what_was_there_before() -> None:
    """Neither one that is known nor one that is being rendered."""
    render, fleet = Renderings(), ["as it was"]
    shared = SharedAnswer(render, 1.0, lambda: fleet[0], clock=lambda: 0.0)
    first = asyncio.ensure_future(shared.get())
    while render.begun < 1:
        await asyncio.sleep(0)
    fleet[0] = "as it is"
    second, third = asyncio.ensure_future(shared.get()), asyncio.ensure_future(shared.get())
    while render.begun < 2:
        await asyncio.sleep(0)
    render.go.set()
    assert [answer.body for answer in await asyncio.gather(first, second, third)] == [b"1", b"2", b"2"]
    fleet[0] = "as it will be"
    assert [(await shared.get()).body for _ in range(2)] == [b"3", b"3"]


async def test_a_reader_that_leaves_does_not_end_what_others_wait_for() -> None:
    render = Renderings()
    shared = SharedAnswer(render, 1.0)
    first, second = asyncio.ensure_future(shared.get()), asyncio.ensure_future(shared.get())
    while not render.begun:
        await asyncio.sleep(0)
    first.cancel()
    render.go.set()
    assert (await second).body == b"1"


async def test_a_rendering_that_fails_is_tried_again() -> None:
    render = Renderings()
    render.go.set()
    render.error = KeyError("gone")
    shared = SharedAnswer(render, 1.0, clock=lambda: 0.0)
    with pytest.raises(KeyError):
        await shared.get()
    render.error = None
    assert (await shared.get()).body == b"2"


@pytest.mark.parametrize("accepts", [b"", b"br", b"deflate, gzip;q=0.5"])
async def test_only_who_takes_gzip_gets_it(accepts: bytes) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    body = b"a line like all others\n" * 100
    answer = RenderedAnswer(body, b"text/plain").pack()
    await answer.send({"headers": [(b"accept-encoding", accepts)]}, send, (b"x-more", b"1"))
    headers = dict(sent[0]["headers"])
    packed = b"gzip" in accepts
    assert (headers.get(b"content-encoding") == b"gzip") == packed
    assert headers[b"vary"] == b"accept-encoding"
    assert headers[b"x-more"] == b"1"
    assert (gzip.decompress(sent[1]["body"]) if packed else sent[1]["body"]) == body
    assert len(sent[1]["body"]) == int(headers[b"content-length"])
