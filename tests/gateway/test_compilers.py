"""Grammar compilers that come and go: what one has taken comes back with it, and no request waits for ever."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from muxserve.gateway.grammars import compiler_process
from muxserve.gateway.grammars import compilers as grammar_compilers
from muxserve.gateway.grammars.compiler_process import (
    LEAST_JOBS,
    MOST_BYTES,
    Command,
    Compile,
    CompileResult,
    Frames,
    GrammarCompiler,
    Helper,
    command,
    frame,
)
from muxserve.gateway.grammars.compilers import GrammarCompilers, GrammarQueue
from muxserve.spec import GrammarLimits
from tests.gateway.unit_specs import model
from tests.support.patience import PATIENCE


class FakeCompilers:
    """Compilers that the test plays: each is a process that does nothing, and the other end of its socket."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.frames = Frames()
        self.told: list[Command] = []

    def another(self, nursery: object = None) -> Helper:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        process.returncode = 0  # `Helper.end` collects it
        self.ends.append(theirs)
        return Helper(os.pidfd_open(process.pid), ours)

    async def asked(self) -> Compile:
        """What the last one is asked to compile next."""
        while not self.ends:
            await asyncio.sleep(0.01)
        self.ends[-1].setblocking(False)
        while not self.told:
            data = await asyncio.get_running_loop().sock_recv(self.ends[-1], 1 << 16)
            self.told += [command(body) for body in self.frames.feed(data)]
        found = self.told.pop(0)
        assert isinstance(found, Compile)
        return found

    def answers(self, asked: Compile, spent: bool = False) -> None:
        self.ends[-1].sendall(frame(CompileResult(asked.job, "accepted", spent=spent)))

    def dies(self) -> None:
        """The last one, whose end of the socket closes."""
        self.ends[-1].close()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCompilers]:
    made = FakeCompilers()
    monkeypatch.setattr(compiler_process, "compiler_of", made.another)
    yield made
    for end in made.ends:
        end.close()


@pytest.fixture
def forked(fakes: FakeCompilers, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Helper, Helper]]:
    """Each nursery that was forked from another one, after that one."""
    found: list[tuple[Helper, Helper]] = []

    def another(nursery: Helper) -> Helper:
        found.append((nursery, fakes.another()))
        return found[-1][1]

    monkeypatch.setattr(compiler_process, "nursery_of", another)
    return found


@pytest.fixture
async def compilers(fakes: FakeCompilers) -> Any:
    made = GrammarCompilers(GrammarLimits(workers=2), [fakes.another(), fakes.another()])
    nurseries = [fakes.ends.pop(), fakes.ends.pop()]
    yield made
    for end in nurseries:
        end.close()
    made.close()


def choice(text: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", text]))


async def test_what_compilers_are_forked_from_is_replaced_before_any_grammar_was_asked_for(
    fakes: FakeCompilers, forked: list[tuple[Helper, Helper]]
) -> None:
    first, second = fakes.another(), fakes.another()
    compilers = GrammarCompilers(GrammarLimits(), [first, second])
    compilers.begin()
    for number, nursery in enumerate((first, second), 1):
        nursery.kill()
        while len(forked) < number:
            await asyncio.sleep(0.01)
    compilers.close()


async def test_one_that_is_lost_while_its_end_is_waited_for_is_replaced_at_once(
    fakes: FakeCompilers, forked: list[tuple[Helper, Helper]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks it hears of its death first, and closes its handle: that is not the one which is watched."""
    monkeypatch.setattr(grammar_compilers, "CHECK_SECONDS", 10 * PATIENCE)
    dies, lives = fakes.another(), fakes.another()
    compilers = GrammarCompilers(GrammarLimits(), [dies, lives])
    compilers.begin()
    await asyncio.sleep(0)  # both are watched
    dies.kill()
    compilers._lose(dies, "is no use any more")
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]  # they get the number of its handle
    assert dies.handle in others
    async with asyncio.timeout(PATIENCE):
        while not forked:
            await asyncio.sleep(0)
    assert [nursery for nursery, _ in forked] == [lives]
    compilers.close()
    for other in others:
        os.close(other)


DIES_BEHIND_FORK = """
import os, signal
from muxserve.gateway.grammars import compiler_process

gateway, fork = os.getpid(), os.fork

def fork_and_die():
    pid = fork()
    if pid and os.getpid() != gateway:
        os.kill(os.getpid(), signal.SIGKILL)
    return pid

os.fork = fork_and_die
first = compiler_process.fork_nursery()
second = compiler_process.nursery_of(first)
second.check()
compiler = compiler_process.compiler_of(second)
for nursery in (first, second):
    try:
        nursery.check()
    except OSError:
        print("died")
    nursery.end()
signal.pidfd_send_signal(compiler.handle, 0)
compiler.end()
print("done")
"""


@pytest.mark.slow
def test_what_a_nursery_has_forked_is_there_although_that_dies_right_behind_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIES_BEHIND_FORK], capture_output=True, text=True, timeout=3 * PATIENCE
    )
    assert done.stdout.split() == ["died", "died", "done"], done.stderr


def test_a_process_that_an_event_loop_has_watched_is_ended() -> None:
    """The loop leaves its descriptor without blocking; waiting for a process that is about to die failed then."""
    helper = FakeCompilers().another()
    os.set_blocking(helper.handle, False)
    os.kill(int(re.search(r"Pid:\s+(\d+)", Path(f"/proc/self/fdinfo/{helper.handle}").read_text())[1]), signal.SIGSTOP)  # type: ignore[index]
    helper.end()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(helper.handle)


async def test_what_compilers_are_forked_from_is_replaced_when_it_hangs(
    fakes: FakeCompilers, forked: list[tuple[Helper, Helper]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(nursery: Helper) -> None:
        if nursery is hangs:
            raise TimeoutError("timed out")

    monkeypatch.setattr(Helper, "check", check)
    monkeypatch.setattr(grammar_compilers, "CHECK_SECONDS", 0.01)
    lives, hangs = fakes.another(), fakes.another()
    compilers = GrammarCompilers(GrammarLimits(), [hangs, lives])
    compilers.begin()
    while not forked:
        await asyncio.sleep(0.01)
    assert [nursery for nursery, _ in forked] == [lives]
    compilers.close()


def test_a_nursery_gives_a_sign_of_life_and_one_that_is_stopped_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=compiler_process._nurse, args=(theirs,), daemon=True)
    monkeypatch.setattr(compiler_process, "set_title", lambda title: None)
    monkeypatch.setattr(compiler_process.signal, "signal", lambda *_: None)
    nursery = Helper(-1, ours)
    thread.start()
    nursery.check()
    ours.shutdown(socket.SHUT_WR)
    thread.join()
    ours.close()
    theirs.close()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(compiler_process, "NURSERY_SECONDS", 0.01)
    with pytest.raises(TimeoutError):
        Helper(-1, ours).check()
    ours.close()
    theirs.close()


async def test_one_that_has_taken_much_is_replaced_when_it_has_nothing_to_do(
    compilers: GrammarCompilers, fakes: FakeCompilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha, killed = model("alpha"), list[Helper]()
    kill = Helper.kill
    monkeypatch.setattr(Helper, "kill", lambda helper: (killed.append(helper), kill(helper)))
    first = asyncio.create_task(compilers.admit(alpha, choice("first")))
    second = asyncio.create_task(compilers.admit(alpha, choice("second")))
    one = await fakes.asked()
    assert compilers.waiting == {"alpha": 2}
    two = await fakes.asked()
    fakes.answers(one, spent=True)
    await first
    assert not killed, "it has something to do yet"
    third = asyncio.create_task(compilers.admit(alpha, choice("third")))
    before = len(fakes.ends)
    fakes.answers(two)
    await second
    assert killed
    fakes.dies()
    while len(fakes.ends) == before:
        await asyncio.sleep(0.01)
    fakes.answers(await fakes.asked())
    await third
    assert not compilers.waiting.total()


async def test_what_is_not_compiled_in_time_is_answered(
    compilers: GrammarCompilers, fakes: FakeCompilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compilers, "LONGEST_SECONDS", 0.05)
    with pytest.raises(GracefulHTTPError, match="was not compiled within"):
        await compilers.admit(model("alpha"), choice("never"))


async def test_a_grammar_is_compiled_again_when_its_compilers_die(
    compilers: GrammarCompilers, fakes: FakeCompilers
) -> None:
    waiting = asyncio.create_task(compilers.admit(model("alpha"), choice("again")))
    for _ in range(3):
        await fakes.asked()
        before = len(fakes.ends)
        fakes.dies()
        while len(fakes.ends) == before:
            await asyncio.sleep(0.01)
    fakes.answers(await fakes.asked())
    await waiting


def test_one_says_so_after_some_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = object.__new__(GrammarCompiler)
    compiler._jobs = 0
    taken = MOST_BYTES
    monkeypatch.setattr(compiler_process, "memory_of", lambda _: SimpleNamespace(private=taken))
    said = [compiler._with_account(CompileResult(job, "accepted")).spent for job in range(2 * LEAST_JOBS)]
    assert [job for job, spent in enumerate(said) if spent] == [LEAST_JOBS - 1, 2 * LEAST_JOBS - 1]
    taken = MOST_BYTES - 1
    assert not any(compiler._with_account(CompileResult(job, "accepted")).spent for job in range(LEAST_JOBS))


# ------------------------------------------------------------ which grammar compiles when


def test_small_ones_first_and_as_many_at_once_as_there_are_workers() -> None:
    queue = GrammarQueue(workers=2)
    for job, size in [(1, 30), (2, 10), (3, 20)]:
        queue.add(job, size)
    assert queue.start() == [(2, True), (3, True)]
    assert queue.start() == []
    queue.remove(3)
    assert queue.start() == [(1, True)]


def test_one_that_takes_long_makes_room_for_quick_ones_and_begins_anew() -> None:
    queue = GrammarQueue(workers=1)
    queue.add(1, 5)
    queue.add(2, 5)
    assert queue.start() == [(1, True)]
    assert queue.overran(1)
    assert queue.start() == [(2, True), (1, False)]
    queue.remove(2)
    queue.add(3, 900)
    assert queue.start() == [(3, True)]
    assert not queue.overran(1)
    assert not queue.running(1)


def test_slow_ones_wait_for_each_other_not_for_quick_ones() -> None:
    queue = GrammarQueue(workers=1)
    queue.add(1, 1)
    queue.start()
    assert queue.overran(1)
    queue.add(2, 1)
    assert queue.start() == [(2, True), (1, False)]
    assert queue.overran(2)
    assert queue.start() == []
    queue.remove(1)
    assert queue.start() == [(2, False)]


def test_who_leaves_is_not_begun() -> None:
    queue = GrammarQueue(workers=1)
    for job in (1, 2, 3):
        queue.add(job, job)
    assert queue.start() == [(1, True)]
    queue.remove(2)
    queue.remove(1)
    assert queue.start() == [(3, True)]
    assert len(queue) == 1


def test_what_was_lost_begins_again() -> None:
    queue = GrammarQueue(workers=1)
    queue.add(1, 1)
    assert queue.start() == [(1, True)]
    queue.again(1)
    assert not queue.running(1)
    assert queue.start() == [(1, True)]
