"""`muxserve deploy`: check everything, start everything, serve until Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from muxserve.cli import ready
from muxserve.cli.gpu_probes import probe_quickly, probe_shapes
from muxserve.cli.output import console, errors, escape, print_error, print_problems
from muxserve.cli.progress import downloads, renderer
from muxserve.cli.settings import DeploySettings
from muxserve.cluster.controller import Controller
from muxserve.cluster.fleet_starts import FleetLauncher, fleet_commands_for
from muxserve.cluster.gpu_host import tried
from muxserve.cluster.launcher import WarmParents, commands_for
from muxserve.cluster.machine import findings, this_machine, vllm_without_cuda
from muxserve.cluster.processes import Reaper
from muxserve.cluster.ray.cluster import gpus_for
from muxserve.cluster.ray.units import RayUnits
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import LocalUnits, PlannedUnit, UnitLauncher
from muxserve.config import Fleet, FleetError, load_fleet
from muxserve.control.changes import ChangeError
from muxserve.control.client import running_fleets
from muxserve.control.previous import PreviousFleet
from muxserve.control.server import ControlServer
from muxserve.control.watch import FileWatch
from muxserve.costs.latency import CostError, LatencyModel
from muxserve.costs.measured import latency_model
from muxserve.gpu import nvml
from muxserve.gpu.sharing import SharingError
from muxserve.net.exit_codes import ExitCode
from muxserve.net.service import notify_service
from muxserve.net.sockets import new_keys
from muxserve.planning.candidates.device_pool import CPU
from muxserve.planning.specs.as_planned import unlike_planned
from muxserve.planning.specs.fleet_planner import FleetPlanner, ScaleOut, notes_of
from muxserve.planning.specs.gpus import pretended_gpus
from muxserve.planning.specs.residency import residency_of
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.planning.specs.unit_specs import fleet_spec_of, planned_unit
from muxserve.spec import FleetSpec, ResidencySpec, SimulatedSpec
from muxserve.spec.run_dir import LogDirError, RunDir, RunDirError, why_not_runtime
from placement.format import enumerate_words

_CAUSES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
}
_HANGUP = "SIGHUP (the terminal was closed)"


class DeployRefused(Exception):  # noqa: N818
    """Nothing was started; the message says why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def deploy(settings: DeploySettings) -> int:
    """Deploy a fleet; returns the exit code when it has ended."""
    try:
        return serve(load_fleet(settings.fleet), settings)
    except FleetError as error:
        print_problems(error, "nothing was started")
        return ExitCode.WRONG


def serve(fleet: Fleet, settings: DeploySettings) -> int:
    """Deploy the fleet that `settings.fleet` declares; returns the exit code when it has ended.

    Raises:
        FleetError: it cannot be served here; nothing was started.
    """
    simulated = _simulated_cpu(settings.profile) if settings.simulated else None
    watch = FileWatch(settings.fleet, os.environ) if settings.watch else None
    try:
        latency = _predictions(settings.profile)
        gpus = gpus_for(fleet, start=True) if simulated is None else partial(pretended_gpus, fleet)
        planner = FleetPlanner(fleet, this_machine(), gpus, simulated=simulated, latency=latency)
        plans = planner.at_start(settings.plan)
        residency = residency_of(planner.fleet, plans, planner.machine)
        gateway = fleet.gateway
        host = gateway.host if settings.host is None else settings.host
        port = gateway.port if settings.port is None else settings.port
        before = _taken_over(port) if settings.take_over else None
        if settings.in_place and before is None:
            raise DeployRefused("--in-place goes with --take-over", ExitCode.WRONG)
        port = _usable_port(host, port if before is None else before.spec.gateway.port, shared=before is not None)
        _check_installation(simulated is None and plans[0].gpu is not None and not plans[0].gpu.elsewhere)
        with downloads() as on_bytes:
            planner.fleet = planner.fetched(planner.fleet, lambda text: console.print(escape(text)), on_bytes)
    except DeployRefused as error:
        print_error(str(error))
        return error.code
    try:
        run_dir = RunDir(log_dir=settings.log_dir)
    except RunDirError as error:
        print_error(str(error))
        return ExitCode.WRONG if isinstance(error, LogDirError) else ExitCode.NOT_DONE
    if reason := why_not_runtime():
        console.print(f"- XDG_RUNTIME_DIR {reason}; sockets and logs are below {escape(str(run_dir.base))} instead")
    if simulated is not None:
        costs = f"measured in {simulated.profile}" if simulated.profile else "the roofline"
        console.print(f"- simulated: engines compute nothing, and take the time of {escape(costs)}")
    if settings.log_dir is not None:
        console.print(f"- logs are kept in {escape(str(run_dir.logs.resolve()))}")
    try:
        plans = [plan.with_paths(planner.fleet) for plan in plans]
        if simulated is None:
            if settings.probe and any(plan.gpu is not None and not plan.gpu.elsewhere for plan in plans):
                probe_quickly()
            plans = [_with_sharing(plan, run_dir, settings.probe) for plan in plans]
            if settings.plan is not None:
                _check_as_planned(plans, settings.plan, planner.latency)
            # Engines need other memory if they share the GPUs in another way.
            residency = residency_of(planner.fleet, plans, planner.machine)
    except DeployRefused as error:
        run_dir.remove()
        print_error(str(error))
        return error.code
    file = FleetFile(settings.fleet, fleet, before, settings.in_place, watch)
    return _run(planner, plans, run_dir, host, port, settings.demo, file, residency)


def _predictions(profile: Path | None) -> LatencyModel:
    """What steps are predicted to cost.

    Raises:
        DeployRefused: the profile cannot be read.
    """
    try:
        return latency_model(profile)
    except CostError as error:
        raise DeployRefused(f"--profile: {error}", ExitCode.WRONG) from None


def _simulated_cpu(profile: Path | None) -> SimulatedSpec:
    """This machine's CPU, with costs as measured, or without a profile by the roofline."""
    return SimulatedSpec(CPU, "" if profile is None else str(profile.resolve()))


class FleetFile(NamedTuple):
    """Where the fleet file is, and what it says; `before` is the running fleet that its fleet takes over from,
    `in_place` one unit after the other. It is followed if there is a `watch`."""

    path: Path
    declared: Fleet
    before: PreviousFleet | None = None
    in_place: bool = False
    watch: FileWatch | None = None


def _taken_over(port: int) -> PreviousFleet:
    """The running fleet at that port; 0: the only one.

    Raises:
        DeployRefused: there is none.
    """
    specs = [(fleet, fleet.spec()) for fleet in running_fleets()]
    there = [PreviousFleet(fleet, spec) for fleet, spec in specs if spec is not None]
    found = [each for each in there if port in (0, each.spec.gateway.port)]
    if len(found) != 1:
        which = f"no fleet of yours listens at port {port}" if port else f"{len(found)} fleets of yours run here"
        listed = enumerate_words([str(each.running) for each in there]) or "none"
        raise DeployRefused(f"--take-over: {which}; running: {listed}", ExitCode.WRONG)
    return found[0]


def _run(
    planner: FleetPlanner,
    plans: Sequence[ResolvedUnit],
    run_dir: RunDir,
    host: str,
    port: int,
    demo: bool,
    file: FleetFile,
    residency: Mapping[str, ResidencySpec] | None = None,
) -> int:
    from muxserve.memory import server

    path = str(run_dir.path)
    units = [planned_unit(plan, path, simulated=planner.simulated, latency=planner.latency) for plan in plans]
    fleet = fleet_spec_of(planner.fleet, units, path, host, port, residency=residency)
    fleet = msgspec.structs.replace(fleet, takes_over=file.before is not None)
    for note in [*planner.reasons, *notes_of(plans)]:
        console.print(f"- {escape(note)}")
    code: int = ExitCode.NOT_DONE
    try:
        code = asyncio.run(_serve(planner, fleet, units, demo, file))
        if file.in_place and file.before is not None and file.before.running.alive:
            _give_back(file.before)
    finally:
        # Units remove what is theirs; this is for an end that did not come to that.
        for unit in units:
            server.remove_segments(unit.unit_spec)
        if code in (ExitCode.DONE, ExitCode.INTERRUPTED):
            run_dir.remove()
        else:
            errors.print(f"logs are kept below {escape(path)} until the next start")
            run_dir.release()
    return code


def _give_back(before: PreviousFleet) -> None:
    """This fleet has ended before it served: the one before it serves what it had."""
    try:
        before.take_back(lambda text: console.print(f"- {escape(text)}"))
    except ChangeError as error:
        print_error(f"{error}; `muxserve apply` with its fleet file has it serve all its models again")


async def _serve(
    planner: FleetPlanner, fleet: FleetSpec, units: Sequence[PlannedUnit], demo: bool, file: FleetFile
) -> int:
    unit_launcher: Callable[[WarmParents, Reaper], UnitLauncher]
    cluster = planner.fleet.cluster
    if cluster.launcher == "ray":
        on_ray = RayUnits(cluster.ray.address, new_keys(), placement=cluster.ray.placement)
        try:
            fleet = await on_ray.reachable(fleet)
        except GaveUp as error:
            print_error(str(error))
            return ExitCode.NOT_DONE
        unit_launcher = lambda *_: on_ray  # noqa: E731
    else:
        unit_launcher = lambda warm, reaper: LocalUnits(commands_for, warm, reaper)  # noqa: E731
    show = renderer(console)
    launcher = FleetLauncher(fleet_commands_for(fleet), fleet.log_dir)
    url = ready.endpoint(fleet.gateway)
    controller = Controller(
        fleet,
        units,
        launcher,
        unit_launcher,
        show,
        ScaleOut(planner),
        lambda changes: ControlServer(changes, lambda: url, file.path.parent.absolute()),
        file.declared,
    )
    loop = asyncio.get_running_loop()
    for number, cause in _CAUSES.items():
        loop.add_signal_handler(number, controller.stop, cause)
    terminal = _has_terminal()

    def tell(text: str) -> None:
        console.print(f"- {escape(text)}")

    def hung_up() -> None:
        if terminal and not _has_terminal():
            controller.stop(_HANGUP)
        else:
            controller.reload(file.path, tell)

    loop.add_signal_handler(signal.SIGHUP, hung_up)
    waits = None if file.in_place else file.before
    beside = [asyncio.create_task(_announce(controller, planner.fleet, demo, waits))]
    if file.watch is not None:
        beside.append(asyncio.create_task(controller.follow(file.path, file.watch, tell)))
    try:
        return await controller.run(file.before if file.in_place else None)
    finally:
        for task in beside:
            task.cancel()
        ended = await asyncio.gather(*beside, return_exceptions=True)
        show.close()
        for each in ended:
            if isinstance(each, Exception):
                raise each


def _has_terminal() -> bool:
    """Whether this process has a terminal that is not closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _announce(controller: Controller, declared: Fleet, demo: bool, before: PreviousFleet | None) -> None:
    await controller.ready.wait()
    notify_service("READY=1", f"MAINPID={os.getpid()}")
    if before is not None:
        try:
            await asyncio.to_thread(before.hand_over, lambda text: console.print(f"- {escape(text)}"))
        except ChangeError as error:
            print_error(str(error))
    await ready.announce(declared, controller.fleet, demo)


def _usable_port(host: str, port: int, shared: bool = False) -> int:
    """`port`, or a free one for 0; `shared` with another fleet of this user.

    Raises:
        Refused: it cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise DeployRefused(
            f"gateway.host {host!r} is no address of this machine: {error.strerror}", ExitCode.WRONG
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken by {_holder_of(port)}; stop it, give another one with --port"
            message += ", or take over from a fleet with `deploy --take-over`"
        elif error.errno == errno.EACCES:
            message = f"port {port} needs more rights than this user has; give one above 1023 with --port"
        elif error.errno == errno.EADDRNOTAVAIL:
            message = f"{host} is no address of this machine; set gateway.host or --host"
        else:
            message = f"cannot listen on {host} port {port}: {error.strerror}"
        raise DeployRefused(message, ExitCode.WRONG) from None


def _holder_of(port: int) -> str:
    """Who listens there, as far as that can be known."""
    for fleet in running_fleets():
        spec = fleet.spec()
        if spec is not None and spec.gateway.port == port:
            return f"another fleet of yours, {fleet}"
    return "another program"


def _with_sharing(plan: ResolvedUnit, run_dir: RunDir, probe: bool = False) -> ResolvedUnit:
    """The plan with the way of sharing GPUs that works here, by trying it. On other machines their hosts try it. With
    `probe` the models' shapes are computed first with percentages that engines would have.

    Raises:
        Refused: MPS does not work here, and it is wanted, or cannot be done without.
    """
    if plan.gpu is None or plan.gpu.elsewhere:
        return plan
    try:
        unit, notes = tried(plan.gpu, plan.fleet.cluster.mps, run_dir.path, nvml.machine())
    except SharingError as error:
        raise DeployRefused(str(error), ExitCode.NOT_DONE) from None
    if probe and unit.sharing == "mps":
        shapes = probe_shapes(plan, unit)
        if shapes is not None and shapes.verdict == "failed":
            unit = unit.without_percentages(findings())
            instead = "have green contexts" if unit.sharing == "green_contexts" else "alternate"
            notes = [*notes, f"without percentages: {shapes.detail}; engines {instead}"]
    for note in notes:
        label, _, text = note.partition(":")
        errors.print(f"[yellow]{label}:[/]{escape(text)}")
    return plan.with_gpu(unit)


def _check_as_planned(plans: Sequence[ResolvedUnit], file: Path, latency: LatencyModel) -> None:
    """Warn of what GPUs do otherwise than the plan has it.

    Raises:
        DeployRefused: the plan does not hold so.
    """
    for found in filter(None, (unlike_planned(plan, latency) for plan in plans)):
        if found.short:
            models = enumerate_words(found.short)
            raise DeployRefused(
                f"{file.name} does not hold on these GPUs: by the estimate {models} would not be served at the rates "
                f"of the plan. {found.words}",
                ExitCode.NOT_DONE,
            )
        errors.print(f"[yellow]{file.name}:[/] {escape(found.words)}")


def _check_installation(on_gpus: bool) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise DeployRefused("vLLM is not installed; `muxserve doctor` says what is missing", ExitCode.NOT_DONE)
    if on_gpus and (other := vllm_without_cuda()):
        raise DeployRefused(
            f"{other}; pip install '.[gpu]' (in MuxServe's repository, into an environment of its own)",
            ExitCode.NOT_DONE,
        )
    try:
        from muxserve.memory import server

        server.binary()
    except (ImportError, FileNotFoundError) as error:
        raise DeployRefused(f"the memory manager is not built: {error}", ExitCode.NOT_DONE) from None
