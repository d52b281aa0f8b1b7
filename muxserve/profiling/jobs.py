"""What is measured: prefill steps and decode steps of one model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from muxserve.engine.synthetic import RequestBodies, RequestsWanted, frame
from muxserve.memory.client import MemoryClient
from muxserve.memory.errors import MemoryManagerError
from muxserve.profiling.contention import Sample
from muxserve.profiling.family import StartError
from muxserve.profiling.player import Player
from muxserve.spec import ModelSpec
from muxserve.wire import HandOver

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
                spare += await self._ask(RequestsWanted(more, prompt_tokens, max_tokens, vocabulary, next(self._seeds)))
        made = spare[-count:]
        del spare[-count:]
        return made

    async def _ask(self, wanted: RequestsWanted) -> list[bytes]:
        if not self._ready:
            await self._answer()
            self._ready = True
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frame(wanted))
        return (await self._answer()).bodies

    async def _answer(self) -> RequestBodies:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            size = int.from_bytes(await self._process.stdout.readexactly(4), "little")
            return msgspec.msgpack.decode(await self._process.stdout.readexactly(size), type=RequestBodies)
        except asyncio.IncompleteReadError:
            raise StartError("the helper that makes requests ended; run `muxserve doctor`") from None


# A request must not end in what is measured, unless that is its end.
_MANY_TOKENS = 100_000
_MANY_STEPS = 4096


@dataclass
class Timing:
    """Steps, and what they do not say: seconds from sending a lease to hearing of its first step beyond that step
    (`turns`), and between the steps of a lease (`gaps`)."""

    steps: list[Sample] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Bench:
    """One model's engines and what it takes to use them."""

    def __init__(self, player: Player, memory: MemoryClient, bodies: Bodies, model: ModelSpec, vocab: int) -> None:
        self.model = model
        self.prefill_line = player.lines[model.name, "prefill"]
        self.decode_line = player.lines[model.name, "decode"]
        self._player = player
        self._memory = memory
        self._bodies = bodies
        self._vocab = max(2, vocab)

    # ------------------------------------------------------------ prefill

    async def prefill_step(self, sequences: int, tokens: int, timing: Timing) -> None:
        """One step that prefills `sequences` prompts of `tokens` tokens."""
        bodies = await self._bodies.make(sequences, tokens, 2, self._vocab)
        line = self.prefill_line
        waiting = line.waiting()
        waiting.since()
        sent = await line.lease(1, [self._player.admit(body) for body in bodies])
        heard = await line.heard()
        waited = waiting.since()
        if heard.report.tokens != sequences * tokens:
            raise StartError(
                f"{self.model.name}: a prefill step of {sequences} x {tokens} tokens computed {heard.report.tokens}"
            )
        timing.steps.append(Sample(heard.report.seconds, waited))
        timing.turns.append(heard.at - sent - heard.report.seconds)
        self._drop(heard.report.handed)

    async def prefill_chunks(self, tokens: int, chunks: int) -> list[Sample]:
        """Each of `chunks` steps that compute `tokens` tokens of one prompt, one after another."""
        (body,) = await self._bodies.make(1, tokens * chunks, 2, self._vocab)
        line = self.prefill_line
        waiting = line.waiting()
        waiting.since()
        await line.lease(chunks, [self._player.admit(body)], tokens)
        steps = []
        for _ in range(chunks):
            heard = await line.heard()
            if heard.report.tokens != tokens:
                raise StartError(f"{self.model.name}: a chunk of {tokens} tokens computed {heard.report.tokens}")
            steps.append(Sample(heard.report.seconds, waiting.since()))
            self._drop(heard.report.handed)
        return steps

    # ------------------------------------------------------------ decode

    async def fill(self, batch: int, context: int) -> list[str]:
        """Prefill `batch` sequences of `context` tokens and have the decode engine adopt them; returns their ids."""
        line = self.prefill_line
        most = max(1, self.model.max_num_batched_tokens // context)
        ids: list[str] = []
        while len(ids) < batch:
            count = min(most, batch - len(ids))
            made = await self._bodies.make(count, context, _MANY_TOKENS, self._vocab)
            admits = [self._player.admit(body) for body in made]
            by_id = {admit.request_id: admit.body for admit in admits}
            await line.lease(_MANY_STEPS, admits)
            handed: list[HandOver] = []
            while len(handed) < count:
                report = (await line.heard()).report
                if report.returned or report.finished:
                    raise StartError(f"{self.model.name}: no room to prefill {batch} x {context} tokens")
                handed += report.handed
            adopted = [self._player.admit(by_id[each.request_id], hand_over=each) for each in handed]
            # Taken in without a step, so that all begin to decode at once.
            await self.decode_line.lease(0, adopted)
            ids += [each.request_id for each in handed]
        return ids

    async def decode_steps(self, steps: int, batch: int, timing: Timing) -> None:
        """Run `steps` decode steps of the `batch` sequences that the engine holds."""
        line = self.decode_line
        waiting = line.waiting()
        waiting.since()
        sent = await line.lease(steps)
        done, last = 0, 0.0
        while done < steps:
            heard = await line.heard()
            report = heard.report
            if report.returned or report.finished or report.tokens != batch * report.steps:
                raise StartError(
                    f"{self.model.name}: {report.steps} decode steps of {batch} sequences "
                    f"computed {report.tokens} tokens"
                )
            timing.steps.append(Sample(report.seconds / report.steps, waiting.since() / report.steps))
            if done == 0 and report.steps == 1:
                timing.turns.append(heard.at - sent - report.seconds)
            if last:
                timing.gaps.append(max(0.0, (heard.at - last - report.seconds) / report.steps))
            last = heard.at
            done += report.steps

    async def empty(self, ids: list[str]) -> None:
        """Have the decode engine drop these sequences."""
        if ids:
            await self.decode_line.abort(ids)

    def _drop(self, handed: list[HandOver]) -> None:
        for each in handed:
            try:
                self._memory.drop(self.model.name, each.key)
            except MemoryManagerError as error:
                raise StartError(f"{self.model.name}: blocks cannot be given back: {error}") from None
