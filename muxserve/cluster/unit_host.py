"""One unit in a process of its own, for launchers that start units on other machines.

python -m muxserve.cluster.unit_host --unit-spec FILE [--gpu-plan FILE] [--serves MODEL ...] [--migrates] [--commands]

The file is the unit's `unit.json` in its directory. A unit on GPUs needs what `GpuPlan.to_json` made, too; it
gets GPUs among those that CUDA_VISIBLE_DEVICES names, and the file then says which. What happens is written to standard
output, one line of JSON each: the events of `cluster.events`, `{"event": "Sized", "unit_spec": ...}` when the sizes of
the pools are known, and answers. SIGTERM ends the unit in order, a second one at once.

With `--commands`, lines of JSON on standard input are carried out, each answered by `{"reply": ID}`, with `error` and
`part` if it failed; the end of the input is as good as SIGTERM, so that the unit ends with whoever holds the other end:

    {"id": 1, "do": "start_model", "model": "NAME"}
    {"id": 2, "do": "stop_model", "model": "NAME"}
    {"id": 3, "do": "start_migrator"}
    {"id": 4, "do": "tell", "message": BASE64}       a message of `muxserve.wire` for the unit scheduler
    {"id": 5, "do": "state"}                         answered with the unit scheduler's `state`
    {"id": 6, "do": "join", "model": "NAME", "unit_spec": {...}, "needs": [...]}     see `UnitHandle.join`
    {"id": 7, "do": "prefetch", "model": "NAME"}

Exit status: 0 ended as asked, 2 wrong input, 3 it could not start, 4 a part kept dying; with 3 and 4 there was a
`Failed`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from muxserve import wire
from muxserve.cluster.events import Event, Failed, PartId, Progress, Stopping, to_line
from muxserve.cluster.gpu_host import GpuHostError, UnitGpus, settle_gpus
from muxserve.cluster.host import UnitHost
from muxserve.cluster.launcher import LocalLauncher, commands_for
from muxserve.cluster.processes import Reaper, adopt_orphans
from muxserve.cluster.supervision import GaveUp
from muxserve.gpu.budget import Needs
from muxserve.gpu.unit import PoolSizer, from_json
from muxserve.net.heartbeat import Heartbeat, heartbeat_file
from muxserve.net.logs import log_to_stderr
from muxserve.spec import UnitSpec, load

log = logging.getLogger(__name__)

HOST = PartId("host")
EXIT_OK, EXIT_BAD_INPUT, EXIT_START, EXIT_KEPT_DYING = 0, 2, 3, 4
_LOOK_MS = 200


class HostProcess:
    """Runs one unit, tells standard output, and does what it is told."""

    def __init__(self, host: UnitHost) -> None:
        self._host = host
        self._stopping = asyncio.Event()
        self._work: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """End in order; at once when called again."""
        if self._stopping.is_set():
            self._host.kill()
        self._stopping.set()

    async def run(self, commands: bool) -> int:
        """Until it is stopped, or a part cannot be kept alive; returns the exit status."""
        self._host.start()
        self._spawn(self._tell_size())
        self._spawn(Heartbeat(heartbeat_file(self._host.unit_spec.run_dir, HOST.file_name)).keep())
        if commands:
            self._spawn(self._obey())
        ending = asyncio.create_task(self._host.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        ends: set[asyncio.Future[Any]] = {ending, stopping}
        code = EXIT_OK
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                code = self._failed(ending.exception())
        finally:
            for task in (ending, stopping, *self._work):
                task.cancel()
            await asyncio.gather(ending, stopping, *self._work, return_exceptions=True)
            say(Stopping())
            await self._host.stop()
        return code

    def _failed(self, failure: BaseException | None) -> int:
        if not isinstance(failure, GaveUp):
            raise failure or RuntimeError("a part is not kept alive any more")
        served = self._host.ready.is_set()
        path, tail = self._host.log_tail_of(failure.part)
        words = f"{failure.part} {'keeps dying' if served else 'cannot start'}: {failure}"
        say(Failed(failure.part, words, path, tail))
        return EXIT_KEPT_DYING if served else EXIT_START

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _tell_size(self) -> None:
        await self._host.sized.wait()
        write({"event": "Sized", "unit_spec": msgspec.to_builtins(self._host.unit_spec)})

    async def _obey(self) -> None:
        reader = asyncio.StreamReader(limit=1 << 20)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        async for line in reader:
            try:
                command = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                log.warning("a line that is no command: %r (%s)", line[:200], error)
                continue
            # Beside: a model takes its time to start, and others need not wait for it.
            self._spawn(self._answer(command))
        self.stop()

    async def _answer(self, command: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"reply": command.get("id")}
        try:
            reply.update(await self._do(command))
        except GaveUp as failure:
            reply.update(error=str(failure), part=msgspec.to_builtins(failure.part))
        except (KeyError, binascii.Error, msgspec.MsgspecError) as error:
            reply.update(error=f"not a command: {error!r}")
        except Exception as error:
            # Whatever it was: somebody waits for the answer.
            log.exception("a command failed: %s", command)
            reply.update(error=f"{type(error).__name__}: {error}")
        write(reply)

    async def _do(self, command: dict[str, Any]) -> dict[str, Any]:
        match command.get("do"):
            case "start_model":
                await self._host.start_model(self._host.unit_spec.model(command["model"]).name)
            case "stop_model":
                await self._host.stop_model(command["model"])
            case "prefetch":
                await self._host.prefetch(self._host.unit_spec.model(command["model"]).name)
            case "start_migrator":
                self._host.start_migrator()
            case "join":
                unit_spec = msgspec.convert(command["unit_spec"], UnitSpec)
                await self._host.join(unit_spec, command["model"], msgspec.convert(command["needs"], list[Needs]))
            case "tell":
                await self._host.tell(wire.decode(base64.b64decode(command["message"])))
            case "state":
                return {"state": await self._host.state()}
            case other:
                raise KeyError(other)
        return {}


def say(event: Event) -> None:
    """Write an event."""
    print(to_line(event), flush=True)


def write(fields: dict[str, Any]) -> None:
    """Write anything else."""
    print(msgspec.json.encode(fields).decode(), flush=True)


async def serve(
    unit_spec: UnitSpec, file: Path, serves: list[str], migrates: bool, commands: bool, sizer: PoolSizer | None
) -> int:
    """Run the unit in this event loop."""
    reaper = Reaper()
    adopt_orphans()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, reaper.reap)
    unit_spec.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    launcher = LocalLauncher(unit_spec, commands_for(unit_spec, file))
    host = UnitHost(unit_spec, serves, launcher, say, reaper, sizer, migrates, movable=True)
    process = HostProcess(host)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop)
    return await process.run(commands)


@contextlib.contextmanager
def ended_with_input(commands: bool) -> Iterator[None]:
    """While something is done that blocks: SIGTERM ends this process in order, and so does the end of its input if it
    gets commands there."""
    over = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(sys.stdin, 0)  # only whether the other end is gone: what it says is read later
        while not over.is_set():
            if poll.poll(_LOOK_MS):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_OK))
    if commands:
        threading.Thread(target=watch, name="input", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)


def settled(unit_spec: UnitSpec, file: Path, plan_file: Path, commands: bool) -> UnitGpus | None:
    """The unit's GPUs, or None if it cannot be served on them, which is told then.

    Raises:
        OSError, msgspec.MsgspecError: the plan cannot be read.
        SystemExit: it was told to stop meanwhile.
    """
    plan = from_json(plan_file.read_bytes())
    try:
        # MPS is tried here, which must be ended in order, too.
        with ended_with_input(commands):
            return settle_gpus(unit_spec, plan, file, os.environ)
    except GpuHostError as error:
        say(Failed(HOST, f"{HOST} cannot start: {error}"))
        return None


def main(arguments: list[str] | None = None) -> int:
    """See above."""
    parser = argparse.ArgumentParser(description="Runs one unit.")
    parser.add_argument("--unit-spec", required=True, type=Path)
    parser.add_argument("--gpu-plan", type=Path, help="of a unit on GPUs: how their memory is divided, and how shared")
    parser.add_argument("--serves", nargs="*", help="the models to start; all by default")
    parser.add_argument("--migrates", action="store_true", help="start a migrator, too")
    parser.add_argument("--commands", action="store_true", help="obey lines of JSON on standard input")
    args = parser.parse_args(arguments)
    log_to_stderr()
    sizer = None
    try:
        unit_spec = load(args.unit_spec)
        known = [model.name for model in unit_spec.models]
        if unknown := sorted(set(args.serves or []) - set(known)):
            raise ValueError(f"{', '.join(unknown)}: not in this unit")
        if unit_spec.gpu is not None:
            if args.gpu_plan is None:
                raise ValueError("a unit on GPUs needs --gpu-plan")
            there = settled(unit_spec, args.unit_spec, args.gpu_plan, args.commands)
            if there is None:
                return EXIT_START
            unit_spec, sizer = there.unit_spec, there.sizer
            for note in there.notes:
                say(Progress(HOST, note))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        print(f"cannot serve {args.unit_spec}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    with contextlib.suppress(KeyboardInterrupt):
        serves = known if args.serves is None else args.serves
        return asyncio.run(serve(unit_spec, args.unit_spec, serves, args.migrates, args.commands, sizer))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
