"""Requests of given lengths, from a helper process that knows vLLM's encoding."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import defaultdict

import msgspec

from muxserve.engine.synthetic import Made, Wanted, frame
from muxserve.profiling.family import StartError

_AHEAD, _AHEAD_TOKENS = 64, 32768


class Bodies:
    """Ask for bodies of requests. An async context manager; the helper takes some seconds to start, in which other
    things can be done."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._ready = False
        self._seeds = itertools.count(1)
        self._asking = asyncio.Lock()
        self._spare: defaultdict[tuple[int, int, int], list[bytes]] = defaultdict(list)

    async def __aenter__(self) -> Bodies:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "muxserve.engine.synthetic", stdin=PIPE, stdout=PIPE, stderr=DEVNULL, process_group=0
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def make(self, count: int, prompt_tokens: int, max_tokens: int, vocabulary: int) -> list[bytes]:
        """`count` requests with random prompts, no two alike.

        Raises:
            StartError: the helper ended.
        """
        spare = self._spare[prompt_tokens, max_tokens, vocabulary]
        async with self._asking:
            if len(spare) < count:
                # More than asked for, so that an engine that works through many of them need not wait for each.
                more = max(count, min(_AHEAD, _AHEAD_TOKENS // prompt_tokens))
                spare += await self._ask(Wanted(more, prompt_tokens, max_tokens, vocabulary, next(self._seeds)))
        made = spare[-count:]
        del spare[-count:]
        return made

    async def _ask(self, wanted: Wanted) -> list[bytes]:
        if not self._ready:
            await self._answer()
            self._ready = True
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frame(wanted))
        return (await self._answer()).bodies

    async def _answer(self) -> Made:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            size = int.from_bytes(await self._process.stdout.readexactly(4), "little")
            return msgspec.msgpack.decode(await self._process.stdout.readexactly(size), type=Made)
        except asyncio.IncompleteReadError:
            raise StartError("the helper that makes requests ended; run `muxserve doctor`") from None
