"""Programs that tests need the results of, run beside the tests from the beginning of the session.

Most tests use one core at a time. What takes long, and is needed only later, is begun when it is known which tests were
chosen: one program after the other, politely, in the order in which the tests need them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

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
        self._running: subprocess.Popen[bytes] | None = None
        self._closed = False

    def add(self, command: Sequence[str], turn: int, environment: Mapping[str, str] | None = None) -> Program:
        """Programs are run by their `turn`: the number of the first test that needs them."""
        program = Program(lambda: self._run(command, environment), self._thread.submit)
        self._added.append((turn, program))
        return program

    def pytest_runtestloop(self) -> None:
        """Begin with the first."""
        for _, program in sorted(self._added, key=lambda each: each[0]):
            program.begin()

    def _run(self, command: Sequence[str], environment: Mapping[str, str] | None) -> str:
        with tempfile.TemporaryFile() as said:
            # What is tested meanwhile goes first.
            polite = ["nice", "-n", "5", *command]
            self._running = subprocess.Popen(polite, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)
            if self._closed:
                self._running.kill()
            status = self._running.wait()
            said.seek(0)
            text = said.read().decode(errors="replace")
        assert status == 0, text[-6000:]
        return text

    def close(self) -> None:
        """End the program that runs, and begin no other."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._running is not None and self._running.poll() is None:
            # It has processes of its own to end.
            self._running.send_signal(signal.SIGINT)
            try:
                self._running.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._running.kill()
        self._thread.shutdown()


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


_OUTPUTS = pytest.StashKey[dict[str, tuple["tempfile.TemporaryDirectory[str]", Program]]]()


def begin(session: pytest.Session, fixture: str, below: Path, module: str, *arguments: str) -> None:
    """For a fixture that is `wanted`: run `python -m MODULE DIRECTORY ARGUMENTS`, which writes into the directory."""
    turn = wanted(session, fixture, below)
    if turn is not None:
        directory = tempfile.TemporaryDirectory(prefix=f"mux-{fixture}-")
        session.config.add_cleanup(directory.cleanup)
        done = beside(session.config).add([sys.executable, "-m", module, directory.name, *arguments], turn)
        session.config.stash.setdefault(_OUTPUTS, {})[fixture] = directory, done


def output(config: pytest.Config, fixture: str) -> Path:
    """The directory into which the program of that fixture has written, when it has ended."""
    directory, done = config.stash[_OUTPUTS][fixture]
    done.result()
    return Path(directory.name)
