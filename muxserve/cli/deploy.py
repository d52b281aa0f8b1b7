"""`muxserve deploy`: check everything, start everything, serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import signal
import socket
from pathlib import Path

from muxserve.cli import ready
from muxserve.cli.output import console, errors, escape, print_error, print_problems
from muxserve.cli.progress import renderer
from muxserve.cluster.controller import EXIT_BAD_INPUT, EXIT_FORCED, EXIT_OK, EXIT_START, Controller
from muxserve.cluster.launcher import LocalLauncher, commands_for
from muxserve.cluster.machine import this_machine
from muxserve.cluster.plan import FleetPlan, deployment_of, fetch, plan_fleet
from muxserve.cluster.run_dir import RunDir, RunDirError
from muxserve.config import Fleet, FleetError, load_fleet
from muxserve.deployment import Deployment, save


class Refused(Exception):  # noqa: N818
    """Nothing was started; the message says why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def deploy(file: Path, host: str | None, port: int | None, demo: bool, plan_file: Path | None = None) -> int:
    """Deploy the fleet in `file`, as `plan_file` has it if given; returns the exit code when it has ended."""
    try:
        fleet = load_fleet(file)
        machine = this_machine()
        if plan_file is not None:
            from muxserve.planning.serving import with_plan

            fleet = with_plan(fleet, plan_file, machine.cores)
        plan = plan_fleet(fleet, machine)
        gateway = fleet.gateway
        host = gateway.host if host is None else host
        port = _usable_port(host, gateway.port if port is None else port)
        _check_installation()
        fleet = fetch(fleet, lambda text: console.print(escape(text)))
    except FleetError as error:
        print_problems(error, "nothing was started")
        return EXIT_BAD_INPUT
    except Refused as error:
        print_error(str(error))
        return error.code
    try:
        run_dir = RunDir()
    except RunDirError as error:
        print_error(str(error))
        return EXIT_START
    return _run(plan.with_fleet(fleet), run_dir, host, port, demo)


def _run(plan: FleetPlan, run_dir: RunDir, host: str, port: int, demo: bool) -> int:
    from muxserve.memory import server

    deployment = deployment_of(plan, str(run_dir.path), host, port)
    for note in plan.unit.notes:
        console.print(f"- {escape(note)}")
    code = EXIT_START
    try:
        file = run_dir.path / "deployment.json"
        save(deployment, file)
        code = asyncio.run(_serve(plan.fleet, deployment, file, demo))
    finally:
        # Only if the memory manager had to be killed is there something left to remove.
        server.remove_segments(deployment)
        if code in (EXIT_OK, EXIT_FORCED):
            run_dir.remove()
        else:
            errors.print(f"logs are kept in {escape(str(run_dir.logs))} until the next start")
            run_dir.release()
    return code


async def _serve(fleet: Fleet, deployment: Deployment, file: Path, demo: bool) -> int:
    launcher = LocalLauncher(commands_for(deployment, file), deployment.log_dir)
    # Each wants to know the other: the renderer the parts, the controller whom to tell.
    controller = Controller(deployment, launcher, lambda event: show(event))
    show = renderer(console, controller.parts)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, controller.stop)
    announcing = asyncio.create_task(_announce(controller, fleet, deployment, demo))
    try:
        return await controller.run()
    finally:
        announcing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcing
        show.close()


async def _announce(controller: Controller, fleet: Fleet, deployment: Deployment, demo: bool) -> None:
    await controller.ready.wait()
    await ready.announce(fleet, deployment, demo)


def _usable_port(host: str, port: int) -> int:
    """`port`, or a free one for 0.

    Raises:
        Refused: it cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise Refused(
            f"gateway.host {host!r} is no address of this machine: {error.strerror}", EXIT_BAD_INPUT
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken by another program; stop it, or give another one with --port"
        elif error.errno == errno.EACCES:
            message = f"port {port} needs more rights than this user has; give one above 1023 with --port"
        elif error.errno == errno.EADDRNOTAVAIL:
            message = f"{host} is no address of this machine; set gateway.host or --host"
        else:
            message = f"cannot listen on {host} port {port}: {error.strerror}"
        raise Refused(message, EXIT_BAD_INPUT) from None


def _check_installation() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise Refused("vLLM is not installed; `muxserve doctor` says what is missing", EXIT_START)
    try:
        from muxserve.memory import server

        server.binary()
    except (ImportError, FileNotFoundError) as error:
        raise Refused(f"the memory manager is not built: {error}", EXIT_START) from None
