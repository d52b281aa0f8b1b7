"""One unit in a process of its own, for launchers that start units on other machines.

python -m muxserve.cluster.unit_host --unit-spec FILE [--gpu-plan FILE] [--serves MODEL ...] [--migrates]
    [--ends-with-input]

The file is the unit's `unit.json` in its directory. A unit on GPUs needs what `GpuPlan.to_json` made, too; it
gets GPUs among those that CUDA_VISIBLE_DEVICES names, and the file then says which. The controller connects to the
unit's `host_address`, or to its `listen.host_port`: it hears what happens and gives commands (`host_link`). SIGTERM
ends the unit in order, a second one at once. With `--ends-with-input` so does the end of standard input: the unit ends
with whoever holds the other end.

Exit status: 0 ended as asked, 2 wrong input, 3 it could not start, 4 a part kept dying; with 3 and 4 there was a
`Failed`, or the log says why.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from muxserve.cluster.events import HOST, Failed, Progress
from muxserve.cluster.gpu_host import GpuHostError, settle_gpus
from muxserve.cluster.host import UnitHost
from muxserve.cluster.host_link import (
    AnyCommand,
    HostEnd,
    JoinUnit,
    ReadState,
    Sized,
    StartMigrator,
    StartModel,
    StopModel,
    Tell,
)
from muxserve.cluster.launcher import Launcher, commands_for
from muxserve.cluster.processes import Reaper
from muxserve.cluster.supervision import GaveUp
from muxserve.gpu.unit import PoolSizer, from_json
from muxserve.net.heartbeat import Heartbeat, heartbeat_file
from muxserve.net.logs import log_to_stderr
from muxserve.net.process import adopt_orphans
from muxserve.net.sockets import NetworkError
from muxserve.spec import UnitSpec, load

EXIT_OK, EXIT_BAD_INPUT, EXIT_START, EXIT_KEPT_DYING = 0, 2, 3, 4
_LOOK_MS = 200
# So long a host that has failed waits for a controller to hear why.
_LAST_WORDS_SECONDS = 10.0


class HostProcess:
    """Runs one unit, and does what the controller asks for."""

    def __init__(self, host: UnitHost, link: HostEnd) -> None:
        self._host = host
        self._link = link
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End in order; at once when called again."""
        if self._stopping.is_set():
            self._host.kill()
        self._stopping.set()

    async def run(self) -> int:
        """Until it is stopped, or a part cannot be kept alive; returns the exit status."""
        self._host.start()
        beats = Heartbeat(heartbeat_file(self._host.unit_spec.run_dir, HOST.file_name))
        beside = [asyncio.create_task(work) for work in (self._tell_size(), beats.keep())]
        ending = asyncio.create_task(self._host.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        ends: set[asyncio.Future[Any]] = {ending, stopping}
        code = EXIT_OK
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                code = self._failed(ending.exception())
        finally:
            for task in (*ends, *beside):
                task.cancel()
            await asyncio.gather(*ends, *beside, return_exceptions=True)
            await self._host.stop()
        return code

    def _failed(self, failure: BaseException | None) -> int:
        if not isinstance(failure, GaveUp):
            raise failure or RuntimeError("a part is not kept alive any more")
        served = self._host.ready.is_set()
        path, tail = self._host.log_tail_of(failure.part)
        words = f"{failure.part} {'keeps dying' if served else 'cannot start'}: {failure}"
        self._link.say(Failed(failure.part, words, str(path or ""), tail))
        return EXIT_KEPT_DYING if served else EXIT_START

    async def _tell_size(self) -> None:
        await self._host.sized.wait()
        self._link.say(Sized(self._host.unit_spec))


async def carry_out(host: UnitHost, command: AnyCommand) -> dict[str, Any] | None:
    """Do what the controller asks a unit for; returns the unit's state if that was asked for.

    Raises:
        GaveUp: see `UnitHandle`; or the unit has no such model.
    """
    names = [model.name for model in host.unit_spec.models]
    match command:
        case StartModel(name) | StopModel(name) if name not in names:
            raise GaveUp(HOST, f"{host.unit_spec.unit} has no model {name}")
        case StartModel(model):
            await host.start_model(model)
        case StopModel(model):
            await host.stop_model(model)
        case StartMigrator():
            host.start_migrator()
        case JoinUnit(model, unit_spec, needs):
            await host.join(unit_spec, model, needs)
        case Tell(message):
            await host.tell(message)
        case ReadState():
            return await host.state()
    return None


@dataclass(frozen=True)
class HostOptions:
    """What the command line says, and what came of the unit's GPUs: `failure` if it cannot be served on them."""

    file: Path
    serves: list[str]
    migrates: bool
    ends_with_input: bool
    sizer: PoolSizer | None = None
    notes: tuple[str, ...] = ()
    failure: str = ""


async def serve(unit_spec: UnitSpec, options: HostOptions) -> int:
    """Run the unit in this event loop; returns the exit status.

    Raises:
        NetworkError, zmq.ZMQError: the host's address cannot be listened on.
    """
    link = HostEnd(unit_spec)
    code = EXIT_START
    try:
        for note in options.notes:
            link.say(Progress(HOST, note))
        if options.failure:
            link.say(Failed(HOST, f"{HOST} cannot start: {options.failure}"))
        else:
            code = await _run(unit_spec, options, link)
        if code != EXIT_OK:
            await link.until_heard(_LAST_WORDS_SECONDS)
    finally:
        await link.close()
    return code


async def _run(unit_spec: UnitSpec, options: HostOptions, link: HostEnd) -> int:
    reaper = Reaper()
    adopt_orphans()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, reaper.reap)
    unit_spec.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    launcher = Launcher(unit_spec, commands_for(unit_spec, options.file))
    sizer, migrates = options.sizer, options.migrates
    host = UnitHost(unit_spec, options.serves, launcher, link.say, reaper, sizer, migrates, movable=True)
    link.obey(lambda command: carry_out(host, command))
    process = HostProcess(host, link)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop)
    if options.ends_with_input:
        loop.add_reader(sys.stdin, _stop_at_end, process)
    return await process.run()


def _stop_at_end(process: HostProcess) -> None:
    if not os.read(sys.stdin.fileno(), 1):
        asyncio.get_running_loop().remove_reader(sys.stdin)
        process.stop()


@contextlib.contextmanager
def _ended_in_order(ends_with_input: bool) -> Iterator[None]:
    """While something is done that blocks: SIGTERM ends this process in order, and so does the end of its input."""
    over = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(sys.stdin, 0)  # only whether the other end is gone
        while not over.is_set():
            if poll.poll(_LOOK_MS):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_OK))
    if ends_with_input:
        threading.Thread(target=watch, name="input", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)


def on_its_gpus(unit_spec: UnitSpec, options: HostOptions, plan_file: Path) -> tuple[UnitSpec, HostOptions]:
    """The unit and the options with the GPUs that it has here, or with the reason why it cannot be served on them.

    Raises:
        OSError, msgspec.MsgspecError: the plan cannot be read.
        SystemExit: it was told to stop meanwhile.
    """
    plan = from_json(plan_file.read_bytes())
    try:
        # MPS is tried here, which must be ended in order, too.
        with _ended_in_order(options.ends_with_input):
            unit_spec, sizer, notes = settle_gpus(unit_spec, plan, options.file, os.environ)
    except GpuHostError as error:
        return unit_spec, replace(options, failure=str(error))
    return unit_spec, replace(options, sizer=sizer, notes=tuple(notes))


def main(arguments: list[str] | None = None) -> int:
    """See above."""
    parser = argparse.ArgumentParser(description="Runs one unit.")
    parser.add_argument("--unit-spec", required=True, type=Path)
    parser.add_argument("--gpu-plan", type=Path, help="of a unit on GPUs: how their memory is divided, and how shared")
    parser.add_argument("--serves", nargs="*", help="the models to start; all by default")
    parser.add_argument("--migrates", action="store_true", help="start a migrator, too")
    parser.add_argument("--ends-with-input", action="store_true", help="end when standard input does")
    args = parser.parse_args(arguments)
    log_to_stderr()
    try:
        unit_spec = load(args.unit_spec)
        known = [model.name for model in unit_spec.models]
        if unknown := sorted(set(args.serves or []) - set(known)):
            raise ValueError(f"{', '.join(unknown)}: not in this unit")
        serves = known if args.serves is None else args.serves
        options = HostOptions(args.unit_spec, serves, args.migrates, args.ends_with_input)
        if unit_spec.gpu is not None:
            if args.gpu_plan is None:
                raise ValueError("a unit on GPUs needs --gpu-plan")
            unit_spec, options = on_its_gpus(unit_spec, options, args.gpu_plan)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        print(f"cannot serve {args.unit_spec}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        return asyncio.run(serve(unit_spec, options))
    except (NetworkError, zmq.ZMQError) as error:
        print(f"cannot listen for the controller: {error}", file=sys.stderr)
        return EXIT_START
    except KeyboardInterrupt:
        return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
