"""What becomes of a request's grammar before the request is submitted: measured, compiled once to see that it can be,
and refused with a reason if not.

The gateway's side of `compiler_process`: nothing here takes long or blocks the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import SamplingParams

from muxserve.gateway.grammars import compiler_process
from muxserve.gateway.grammars.compiler_process import (
    CHUNK,
    WALL_FACTOR,
    WALL_SECONDS,
    Compile,
    CompileResult,
    Constraints,
    Drop,
    Frames,
    Helper,
    frame,
    result,
)
from muxserve.gateway.grammars.size import refusal
from muxserve.spec import GrammarLimits, ModelSpec

log = logging.getLogger(__name__)

PARAMETER = "structured_outputs"
# What a grammar gets at first. Most take a few milliseconds.
QUICK_SECONDS = 0.25
MOST_WAITING = 256
# Answers that are kept for grammars that come again.
KEPT_ANSWERS = 1024
KEPT_BYTES = 8 << 20
# A compiler that says nothing of a job for so long after it must have ended does not do anything any more. One that was
# started anew has to import vLLM first, and each reads tokenizers.
SILENCE_SECONDS = 90.0
RESTART_SECONDS = 5.0
# It is a child of the compiler that a grammar may kill: that compilers die is not held against it soon.
MOST_TRIES = 8
# Whoever has waited so long for a grammar is answered, whatever keeps it.
LONGEST_SECONDS = 120.0
# Two nurseries: one forks another when the other one has died, or gives no sign of life so often.
NURSERIES = 2
CHECK_SECONDS = 10.0


@dataclass(slots=True)
class GrammarQueue:
    """Jobs that wait, and those that compile: `workers` of each kind at once. Quick jobs overtake slow ones, small jobs
    large ones.

    Every grammar first gets a short time in a place for quick ones. One that is not through by then is begun again,
    with all the time that a grammar may take, in a place for slow ones."""

    workers: int
    _waiting: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    # By job: its size, and whether it is a quick one.
    _jobs: dict[int, tuple[int, bool]] = field(default_factory=dict)
    _running: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: int, size: int) -> None:
        """A new job; its `size` decides among those that wait."""
        self._put(job, size, quick=True)

    def overran(self, job: int) -> bool:
        """A job that runs took all the time that it had; false if it may not try again."""
        size, quick = self._jobs[job]
        self.remove(job)
        if quick:
            self._put(job, size, quick=False)
        return quick

    def again(self, job: int) -> None:
        """A job that runs was lost, and begins anew."""
        size, quick = self._jobs[job]
        self.remove(job)
        self._put(job, size, quick)

    def remove(self, job: int) -> None:
        """A job that has ended, or that nobody wants any more."""
        self._jobs.pop(job, None)
        self._running.discard(job)

    def running(self, job: int) -> bool:
        """Whether it compiles."""
        return job in self._running

    def start(self) -> list[tuple[int, bool]]:
        """Jobs that begin to compile now, and whether they have a short time only."""
        begun: list[tuple[int, bool]] = []
        for quick, waiting in self._waiting.items():
            room = self.workers - sum(self._jobs[job][1] is quick for job in self._running)
            while room > 0 and waiting:
                size, job = heapq.heappop(waiting)
                if self._jobs.get(job) != (size, quick) or job in self._running:
                    continue  # it left, or waits elsewhere by now
                self._running.add(job)
                begun.append((job, quick))
                room -= 1
        return begun

    def _put(self, job: int, size: int, quick: bool) -> None:
        self._jobs[job] = size, quick
        heapq.heappush(self._waiting[quick], (size, job))


@dataclass(eq=False, slots=True)
class CompileJob:
    """A grammar that compiles, or waits for that, and who wants to know."""

    number: int
    key: bytes
    model: ModelSpec
    constraints: Constraints
    answer: asyncio.Future[CompileResult]
    wanted_by: int = 0
    tries: int = 0
    silence: asyncio.TimerHandle | None = None


class GrammarCompilers:
    """The grammars of one gateway's requests.

    Args:
        limits: what a grammar may be and cost.
        nurseries: what compilers are forked from; without any that lives, they are started, which takes a while.
    """

    def __init__(self, limits: GrammarLimits, nurseries: Iterable[Helper] = ()) -> None:
        self.limits = limits
        self._nurseries = list(nurseries)
        self._compiler: Helper | None = None
        # It has taken much memory: it ends when it has nothing left to do.
        self._spent = False
        self._numbers = itertools.count(1)
        self._jobs: dict[int, CompileJob] = {}
        self._by_key: dict[bytes, CompileJob] = {}
        self._queue = GrammarQueue(limits.workers)
        self._answers = Answers()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._nursing: asyncio.Task[None] | None = None
        # One order to a nursery at a time.
        self._forking = asyncio.Lock()

    @property
    def waiting(self) -> Counter[str]:
        """How many requests wait for their grammar, by model."""
        found: Counter[str] = Counter()
        for job in self._jobs.values():
            found[job.model.name] += job.wanted_by
        return found

    async def admit(self, model: ModelSpec, params: SamplingParams) -> None:
        """Go on if the grammar of `params`, should they have one, can be compiled; its backend is set then.

        Raises:
            VLLMValidationError: it is too large, invalid, too costly to compile, or leaves no token.
            GracefulHTTPError: nothing can be compiled at the moment.
        """
        structured = params.structured_outputs
        if structured is None or structured.all_constraints_none():
            return
        fields = {name: value for name, value in vars(structured).items() if value and not name.startswith("_")}
        for name in ("json", "regex", "choice", "grammar", "structural_tag", "json_object"):
            if (value := getattr(structured, name)) is not None:
                fields[name] = value  # also what is empty: that is for the compiler to judge
        too_large = refusal(fields, self.limits)
        if too_large is not None:
            raise VLLMValidationError(too_large, parameter=PARAMETER)
        constraints = Constraints(
            fields,
            params.allowed_token_ids,
            [words[0] for words in params.bad_words_token_ids or () if len(words) == 1],
            sorted(params.all_stop_token_ids),
            params.min_tokens,
        )
        compiled = await self._compile(model, constraints)
        if compiled.outcome == "failed":
            log.error("no grammar of %s can be compiled: %s", model.name, compiled.reason)
            raise GracefulHTTPError(
                "structured output is not available at the moment; try again in a while",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
        if compiled.outcome != "accepted":
            raise VLLMValidationError(self._words(compiled), parameter=PARAMETER)
        for name, value in compiled.changes.items():
            setattr(structured, name, value)

    def begin(self) -> None:
        """Replace nurseries that die from now on, also before anybody has asked for a grammar. In the running loop."""
        self._nursing = asyncio.ensure_future(self._keep_nurseries())

    def close(self) -> None:
        """End the compiler."""
        for task in (self._reading, self._nursing):
            if task is not None:
                task.cancel()
        for helper in [self._compiler, *self._nurseries]:
            if helper is not None:
                helper.end()

    def _words(self, compiled: CompileResult) -> str:
        if compiled.outcome == "slow":
            return (
                f"compiling the grammar takes more than {self.limits.compile_seconds:g} s of CPU time; "
                "try a simpler one"
            )
        return f"the structured output cannot be used: {compiled.reason}"

    # ------------------------------------------------------------ jobs

    async def _compile(self, model: ModelSpec, constraints: Constraints) -> CompileResult:
        body = msgspec.msgpack.encode((model.path, model.engine_args, constraints))
        key = hashlib.sha256(body).digest()
        known = self._answers.get(key)
        if known is not None:
            return known
        job = self._by_key.get(key)
        if job is None:
            if len(self._queue) >= MOST_WAITING:
                raise GracefulHTTPError(
                    "too many structured outputs wait to be compiled; try again in a moment",
                    HTTPStatus.SERVICE_UNAVAILABLE,
                )
            future = asyncio.get_running_loop().create_future()
            job = CompileJob(next(self._numbers), key, model, constraints, future)
            self._jobs[job.number] = self._by_key[key] = job
            self._queue.add(job.number, len(body))
            self._go_on()
        job.wanted_by += 1
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                return await asyncio.shield(job.answer)
        except TimeoutError:
            log.error("a grammar of %s was not compiled within %g s", model.name, LONGEST_SECONDS)
            raise GracefulHTTPError(
                f"the structured output was not compiled within {LONGEST_SECONDS:g} s; try again in a while",
                HTTPStatus.SERVICE_UNAVAILABLE,
            ) from None
        finally:
            job.wanted_by -= 1
            if not job.wanted_by and not job.answer.done():
                self._drop(job)

    def _drop(self, job: CompileJob) -> None:
        """Nobody waits for it any more."""
        if self._queue.running(job.number):
            self._send(Drop(job.number))
        self._forget(job)
        self._go_on()

    def _forget(self, job: CompileJob) -> None:
        if job.silence is not None:
            job.silence.cancel()
        self._queue.remove(job.number)
        del self._jobs[job.number], self._by_key[job.key]

    def _go_on(self) -> None:
        """Begin what can begin."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._serve())
        if self._writer is None:
            return
        if self._spent:
            if self._compiler is not None and not any(map(self._queue.running, self._jobs)):
                self._compiler.kill()
            return
        for number, quick in self._queue.start():
            job = self._jobs[number]
            seconds = min(QUICK_SECONDS, self.limits.compile_seconds) if quick else self.limits.compile_seconds
            self._send(Compile(number, job.model, job.constraints, seconds, self.limits.compile_bytes))
            patience = WALL_FACTOR * seconds + WALL_SECONDS + SILENCE_SECONDS
            if job.silence is not None:
                job.silence.cancel()  # of a compiler that has died since
            job.silence = asyncio.get_running_loop().call_later(patience, self._silent)

    def _take(self, compiled: CompileResult) -> None:
        self._spent |= compiled.spent
        job = self._jobs.get(compiled.job)
        if job is None:
            return  # dropped meanwhile
        if job.silence is not None:
            job.silence.cancel()
        if not (compiled.outcome == "slow" and self._queue.overran(job.number)):
            self._end(job, compiled)
        self._go_on()

    def _end(self, job: CompileJob, compiled: CompileResult) -> None:
        self._forget(job)
        if compiled.outcome != "failed":
            self._answers.put(job.key, compiled)
        job.answer.set_result(compiled)

    # ------------------------------------------------------------ the compiler

    def _send(self, message: Compile | Drop) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    def _silent(self) -> None:
        log.error("the grammar compiler does not answer; starting another one")
        if self._compiler is not None:
            self._compiler.kill()

    async def _serve(self) -> None:
        """Listen to the compiler, and have another one when it has died."""
        while True:
            try:
                compiler = self._compiler = await self._another()
                await self._listen(compiler)
                if self._spent:
                    log.info("the grammar compiler has taken much memory; another one takes its place")
                else:
                    log.warning("the grammar compiler died; another one takes its place")
                self._compiler = None  # its handle may soon be another process's
                await asyncio.to_thread(compiler.end)
            except OSError as error:
                log.error("no grammar compiler can be started: %s", error)
                await asyncio.sleep(RESTART_SECONDS)
            self._compiler, self._spent = None, False
            for job in list(self._jobs.values()):
                if self._queue.running(job.number):
                    job.tries += 1
                    if job.tries >= MOST_TRIES:
                        self._end(job, CompileResult(job.number, "failed", "the grammar compiler died"))
                    else:
                        self._queue.again(job.number)

    async def _another(self) -> Helper:
        """A compiler; raises OSError if there can be none."""
        while True:
            if not self._nurseries:
                log.warning("all that grammar compilers are forked from has died; importing vLLM once more")
                self._nurseries.append(await asyncio.to_thread(compiler_process.start_nursery))
            if self._nursing is None or self._nursing.done():
                self.begin()
            compiler = await self._forked(self._nurseries[0], compiler_process.compiler_of)
            if compiler is not None:
                return compiler

    async def _forked(self, nursery: Helper, fork: Callable[[Helper], Helper]) -> Helper | None:
        """What `nursery` forks; None if it has died or hangs, and then it is gone."""
        async with self._forking:
            try:
                return await asyncio.to_thread(fork, nursery)
            except OSError as error:
                self._lose(nursery, f"is no use any more: {error or type(error).__name__}")
                return None

    async def _keep_nurseries(self) -> None:
        """Replace a nursery that has died or hangs by one that the other forks, while there is any."""
        while self._nurseries:
            while self._nurseries and len(self._nurseries) < NURSERIES:
                nursery = await self._forked(self._nurseries[0], compiler_process.nursery_of)
                if nursery is not None:
                    self._nurseries.append(nursery)
            ends = {nursery: _end_of(nursery) for nursery in self._nurseries}
            try:
                ended, _ = await asyncio.wait(ends.values(), timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends.values():
                    end.cancel()
            for nursery, end in ends.items():
                if end in ended:
                    self._lose(nursery, "has died")
            if not ended and self._nurseries:
                await self._check(self._nurseries[-1])
                # The other one is the first that is asked next time, to check or to fork.
                self._nurseries.reverse()

    async def _check(self, nursery: Helper) -> None:
        """A nursery that gives no sign of life is gone."""
        async with self._forking:
            try:
                await asyncio.to_thread(nursery.check)
            except OSError as error:
                self._lose(nursery, f"hangs: {error or type(error).__name__}")

    def _lose(self, nursery: Helper, why: str) -> None:
        if nursery in self._nurseries:
            log.warning("a spare grammar compiler %s", why)
            self._nurseries.remove(nursery)
            nursery.end()

    async def _listen(self, compiler: Helper) -> None:
        reader, self._writer = await asyncio.open_connection(sock=compiler.socket)
        self._go_on()
        frames = Frames()
        try:
            while data := await reader.read(CHUNK):
                for body in frames.feed(data):
                    self._take(result(body))
        except ConnectionError:
            pass
        finally:
            self._writer.close()
            self._writer = None


def _end_of(helper: Helper) -> asyncio.Future[None]:
    """Done when the process has ended. Its handle may be closed meanwhile: what is watched is a copy, since a closed
    number may soon be another file's."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    handle = os.dup(helper.handle)

    def forget(_: asyncio.Future[None]) -> None:
        loop.remove_reader(handle)
        os.close(handle)

    ended.add_done_callback(forget)
    loop.add_reader(handle, lambda: None if ended.done() else ended.set_result(None))
    return ended


class Answers:
    """The results of the last grammars."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[CompileResult, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> CompileResult | None:
        """The answer for the grammar of that hash, if it is kept."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: bytes, compiled: CompileResult) -> None:
        """Keep an answer."""
        size = len(msgspec.msgpack.encode(compiled))
        self._kept[key] = compiled, size
        self._bytes += size
        while self._bytes > KEPT_BYTES or len(self._kept) > KEPT_ANSWERS:
            self._bytes -= self._kept.popitem(last=False)[1][1]
