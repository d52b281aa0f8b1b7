"""Programs that tests need the results of, run beside the tests from the beginning of the session.

Most tests use one core at a time. What takes long, and is needed only later, is begun when it is known which tests were
chosen: one program after the other, politely, in the order in which the tests need them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import preloaded
from tests.support.kept import Kept

ROOT = Path(__file__).resolve().parents[2]
_END_SECONDS = 15.0


class Program:
    """A program that tests need the result of. One that failed is run again when it is asked for again."""

    def __init__(self, run: Callable[[], str], submit: Callable[[Callable[[], str]], Future[str]]) -> None:
        self._run, self._submit = run, submit
        self._future: Future[str] | None = None
        self._failed = False

    def begin(self) -> None:
        """Run it when those before it have ended."""
        self._future, self._failed = self._submit(self._run), False

    def result(self, timeout: float | None = None) -> str:
        """What it says, once it has ended well; an `AssertionError` with its last words if it does not."""
        # Asked again after a failure: by a test that runs once more.
        if self._future is None or self._failed:
            self.begin()
        assert self._future is not None
        try:
            return self._future.result(timeout)
        except AssertionError:
            self._failed = True
            raise


class Beside:
    """Runs programs, as a plugin of pytest: from the moment when it runs tests."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._added: list[tuple[int, Program]] = []
        self._running: int | None = None
        self._idle = threading.Event()
        self._closed = False

    def add(
        self,
        command: Sequence[str],
        turn: int,
        environment: Mapping[str, str] | None = None,
        start: Callable[..., subprocess.Popen[bytes] | preloaded.Forked] = subprocess.Popen,
    ) -> Program:
        """Programs are run by their `turn`: the number of the first test that needs them."""
        program = Program(lambda: self._run(command, environment, start), self._thread.submit)
        self._added.append((turn, program))
        return program

    def pytest_runtestloop(self) -> None:
        """Begin with the first."""
        for _, program in sorted(self._added, key=lambda each: each[0]):
            program.begin()

    def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        start: Callable[..., subprocess.Popen[bytes] | preloaded.Forked],
    ) -> str:
        with tempfile.TemporaryFile() as said:
            self._idle.clear()
            try:
                process = start(command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)
                self._running = process.pid
                with contextlib.suppress(ProcessLookupError):
                    # What is tested meanwhile goes first.
                    os.setpriority(os.PRIO_PROCESS, process.pid, 5)
                if self._closed:
                    process.kill()
                status = process.wait()
            finally:
                self._running = None
                self._idle.set()
            said.seek(0)
            text = said.read().decode(errors="replace")
        assert status == 0, text[-6000:]
        return text

    def close(self) -> None:
        """End the program that runs, and begin no other."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        # It has processes of its own to end.
        self._tell(signal.SIGINT)
        if self._running is not None and not self._idle.wait(_END_SECONDS):
            self._tell(signal.SIGKILL)
        self._thread.shutdown()

    def _tell(self, number: signal.Signals) -> None:
        if (pid := self._running) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


_BESIDE = pytest.StashKey[Beside]()


def beside(config: pytest.Config) -> Beside:
    """The one of this session."""
    if _BESIDE not in config.stash:
        config.stash[_BESIDE] = made = Beside()
        config.pluginmanager.register(made)
        config.add_cleanup(made.close)
    return config.stash[_BESIDE]


def wanted(session: pytest.Session, fixture: str, below: Path) -> int | None:
    """The number of the first test in the directory `below` that uses that fixture, if any is going to be run."""
    if session.config.option.collectonly:
        return None
    using = (
        number
        for number, item in enumerate(session.items)
        if below in item.path.parents and fixture in getattr(item, "fixturenames", ())
    )
    return next(using, None)


_OUTPUTS = pytest.StashKey[dict[str, Callable[[], Path]]]()


def begin(session: pytest.Session, fixture: str, below: Path, module: str, *arguments: str, keep: bool = False) -> None:
    """For a fixture that is `wanted`: run `python -m MODULE DIRECTORY ARGUMENTS`, which writes into the directory. It
    is forked from a process that has imported vLLM. `keep`: what it has written is kept for the next session, as long
    as it would write the same again."""
    turn = wanted(session, fixture, below)
    if turn is None:
        return
    outputs = session.config.stash.setdefault(_OUTPUTS, {})
    kept = Kept(fixture, [module, *arguments]) if keep else None
    if kept is None:
        scratch = tempfile.TemporaryDirectory(prefix=f"mux-{fixture}-")
        session.config.add_cleanup(scratch.cleanup)
        directory = Path(scratch.name)
    elif (found := kept.found()) is not None:
        outputs[fixture] = lambda: found
        return
    else:
        directory = kept.new()
        session.config.add_cleanup(lambda: kept.forget(directory))
    command = [sys.executable, "-m", module, str(directory), *arguments]
    program = beside(session.config).add(command, turn, start=functools.partial(preloaded.start, stock=True))

    def made() -> Path:
        program.result()
        if kept is not None:
            kept.keep(directory)
        return directory

    outputs[fixture] = made


def output(config: pytest.Config, fixture: str) -> Path:
    """The directory into which the program of that fixture has written, when it has ended."""
    return config.stash[_OUTPUTS][fixture]()
