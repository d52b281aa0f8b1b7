"""A real fleet: `muxserve deploy` as a user runs it, and what a test needs to see and break of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import yaml

from muxserve.memory.client import MemoryClient
from tests.support import preloaded
from tests.support.patience import PATIENCE, eventually
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs/quickstart.yaml"
START_SECONDS = 3 * PATIENCE
FOREIGN = "foreign.lock"


def fleet_file(
    directory: Path,
    model_changes: dict[str, Any] | None = None,
    changes_of: dict[str, dict[str, Any]] | None = None,
    without: Collection[str] = (),
    source: Path = QUICKSTART,
    **changes: Any,
) -> Path:
    """The quickstart fleet, or that of another file, with changes of every model, of some by name, and of the fleet;
    without some models, and with absolute paths of the others."""
    fleet = yaml.safe_load(source.read_text())
    fleet["models"] = [model for model in fleet["models"] if model["name"] not in without]
    for model in fleet["models"]:
        model["path"] = str((source.parent / model["path"]).resolve())
        model["limits"] = {"max_wait": "none"}  # the tests mean to queue, on machines that are busy otherwise
        model.update(model_changes or {})
        model.update((changes_of or {}).get(model["name"], {}))
        # Most tests are of a prefill and a decode engine; others say what their models have.
        if not model.keys() & {"engines", "dispatch", "stages", "kv"}:
            model["engines"] = "split"
    fleet.update(changes)
    path = directory / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    return path


class Fleet:
    """A running `muxserve deploy`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | preloaded.Forked,
        port: int,
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process = process
        self.environment = {**os.environ, **(environment or {})}
        # What `muxserve deploy` is to end with.
        self.exit_code = 0
        self.directory = directory
        self.url = f"http://127.0.0.1:{port}"
        # Reading certificates, which nobody needs here, would take more time than most questions.
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=4 * PATIENCE,
            http_client=openai.DefaultHttpxClient(verify=False),
        )
        # Any gateway may answer.
        self._http = httpx.Client(verify=False, timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0))

    def async_client(self) -> openai.AsyncOpenAI:
        """A new client; one belongs to the event loop that it was first used in."""
        http_client = openai.DefaultAsyncHttpxClient(verify=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=4 * PATIENCE, http_client=http_client
        )

    @property
    def runtime(self) -> Path:
        """Where run directories are, of a fleet that has a place of its own for them."""
        return Path(self.environment["XDG_RUNTIME_DIR"])

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command as the fleet's user gives it, in the environment that the fleet was started in."""
        line = [sys.executable, "-m", "muxserve.cli.app", *words]
        return subprocess.run(
            line, capture_output=True, text=True, timeout=4 * PATIENCE, cwd=ROOT, env=self.environment
        )

    def get(self, path: str) -> httpx.Response:
        return self._http.get(f"{self.url}{path}")

    def processes(self) -> list[psutil.Process]:
        """All of the fleet, including those whose parent has died."""
        session = self.process.pid  # it leads a session of its own
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == session:
                    found.append(process)
            except ProcessLookupError:
                continue
        return found

    def commands(self) -> list[tuple[psutil.Process, list[str]]]:
        """The processes that run, with their command lines."""
        found = []
        for process in self.processes():
            # A zombie, and one that has just ended, has none.
            with contextlib.suppress(psutil.Error):
                found.append((process, process.cmdline()))
        return found

    def left(self) -> list[list[str]]:
        """The command lines of those that have not ended. A zombie, which nobody has collected yet, has ended."""
        found = []
        for process, line in self.commands():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(line)
        return found

    def parts(self, *words: str) -> list[psutil.Process]:
        """The processes whose command line holds all `words`."""
        return [process for process, line in self.commands() if all(word in " ".join(line) for word in words)]

    def part(self, *words: str) -> psutil.Process | None:
        """The first such process."""
        return next(iter(self.parts(*words)), None)

    def kill(self, *words: str) -> int:
        process = self.part(*words)
        assert process is not None, f"no process with {words} in its command line"
        process.send_signal(signal.SIGKILL)
        return process.pid

    def healthy(self) -> bool:
        try:
            return self.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait_healthy(self, seconds: float = START_SECONDS) -> None:
        """Until every part of every model serves again."""
        self.wait(self.healthy, seconds, "healthy")

    def wait(self, condition: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not {what} within {seconds:.0f} s"
            assert self.process.poll() is None, f"muxserve deploy ended with {self.process.returncode}"
            time.sleep(0.1)

    def account(self) -> str:
        """What it tells of itself, and the end of its log: for a failure that nobody saw."""
        said = [f"--- {path}\n{self._told(path)}" for path in ("/health", "/fleet")]
        log = (self.directory / "deploy.log").read_text()[-20_000:]
        return "\n".join([*said, f"--- deploy\n{log}"])

    def _told(self, path: str) -> str:
        try:
            return self.get(path).text
        except httpx.TransportError as error:
            return repr(error)

    def memory(self) -> list[dict[str, Any]]:
        """The memory managers' own statistics."""
        stats = []
        for _, line in self.commands():
            if "muxserve-memory-manager" not in " ".join(line) or "--socket" not in line:
                continue
            client = MemoryClient(line[line.index("--socket") + 1], "test", PATIENCE)
            try:
                stats.append(client.stats())
            finally:
                client.close()
        assert stats, "no memory manager"
        return stats

    def pages_in_use(self) -> int:
        return sum(m["owned_pages"] + m["handed_pages"] for stats in self.memory() for m in stats["models"])

    def wait_pages_free(self) -> None:
        self.wait(lambda: self.pages_in_use() == 0, PATIENCE, "free of owned pages")


@contextmanager
def running(
    path: Path,
    seconds: float = START_SECONDS,
    environment: Mapping[str, str] | None = None,
    start: Callable[..., subprocess.Popen[bytes] | preloaded.Forked] = subprocess.Popen,
    options: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Deploy the fleet file with `options`, and with `environment` beside that of the tests, wait until it serves
    (within `seconds`), and stop it as a user would. `preloaded.start` starts it with vLLM imported, for tests that are
    not about that."""
    port = free_port()
    log = open(path.parent / "deploy.log", "wb")  # noqa: SIM115
    # As a shell may leave some open that started it: what is locked here must not stay locked by the fleet.
    foreign = open(path.parent / FOREIGN, "wb")  # noqa: SIM115
    process = start(
        [sys.executable, "-m", "muxserve.cli.app", "deploy", str(path), "--port", str(port), *options],
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd=path.parent,
        pass_fds=[foreign.fileno()],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(":")]),
            **(environment or {}),
        },
    )
    foreign.close()
    fleet = Fleet(process, port, path.parent, environment)
    try:
        fleet.wait_healthy(seconds)
        yield fleet
        process.send_signal(signal.SIGINT)
        assert process.wait(2 * PATIENCE) == fleet.exit_code
        eventually(lambda: not fleet.left(), lambda: f"processes were left behind: {fleet.left()}")
    except BaseException:
        print(f"--- deploy\n{(path.parent / 'deploy.log').read_text()[-4000:]}", file=sys.stderr)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for each in fleet.processes():
            with suppress(psutil.NoSuchProcess):  # it ends with another
                each.kill()
        log.close()
