"""The process that imports vLLM once on a machine; gateways and the warm parents of its units are forked from it.

python -m muxserve.forks.machine_parent --fleet FILE --control-fd N --lifeline-fd M

What is forked here lives on when this process dies: gateways hold the clients' connections, and a unit's warm parent
has all of the unit's engines below it. Both end with the controller, whose ends of the lifeline and of their control
sockets close then.

A spare one is forked from it, too, and takes its place when it dies: nothing is imported again, which would take half a
minute, and memory for everything that is imported. When both have died, the warm parent of a unit on a CPU forks one.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
from pathlib import Path
from typing import Any

from muxserve.forks import warm_parent
from muxserve.forks.family import SPARE_PARENT_TITLE, VLLM_PARENT_TITLE, Control, ForkingParent
from muxserve.net.heartbeat import PERIOD_SECONDS, Heartbeat, heartbeat_file
from muxserve.net.logs import log_to_stderr
from muxserve.net.process import set_title, words
from muxserve.spec import load_fleet

log = logging.getLogger(__name__)


def preload(device: str) -> None:
    """Import what gateways and engines on `device` (cpu or cuda) need. Touches no GPU."""
    from muxserve.gateway import main as gateway

    gateway.preload()
    warm_parent.preload(device)


class MachineParent:
    """Forks gateways and warm parents as it is told.

    `fleet_file` is read anew by each gateway that is forked, since the fleet changes while it serves.
    """

    def __init__(self, fleet_file: str, control: Control, lifeline_fd: int) -> None:
        self.fleet_file = fleet_file
        beat = heartbeat_file(Path(fleet_file).parent, "vllm")
        self.control = control
        self.lifeline_fd = lifeline_fd
        self._parent = ForkingParent(control, control, self._handle, heartbeat=beat)

    def run(self) -> None:
        """Serve the controller until it goes away."""
        self.control.event("ready")
        self._parent.run()

    def _handle(self, command: dict[str, Any]) -> None:
        fds: list[int] = command.get("fds", [])
        try:
            if command.get("op") == "fork" and command["kind"] == "gateway":
                self._fork_gateway(int(command["index"]))
            elif command.get("op") == "fork" and command["kind"] == "warm_parent":
                self._fork_warm_parent(command["unit"], command["unit_spec"], Path(command["log"]), fds[0])
            elif command.get("op") == "fork" and command["kind"] == "spare":
                self._fork_spare(Path(command["log"]), fds[0])
            else:
                log.warning("unknown command %r", command)
        finally:
            for fd in fds:
                os.close(fd)

    def _fork_gateway(self, index: int) -> None:
        fleet = load_fleet(self.fleet_file)

        def child() -> None:
            from muxserve.gateway.main import run

            def on_up() -> None:
                self.control.event("up", kind="gateway", index=index, pid=os.getpid())

            # Until it can read the fleet's file anew, a change of that must not end it.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            try:
                run(load_fleet(self.fleet_file), index, self.lifeline_fd, on_up)
            except Exception as error:
                self.control.event("failed", kind="gateway", index=index, error=words(error))
                raise

        name = f"gateway {index}"
        pid = self._parent.fork(name, fleet.log_dir / f"gateway-{index}.log", child, die_with_parent=False)
        self.control.event("forked", kind="gateway", index=index, pid=pid)

    def _fork_warm_parent(self, unit: str, file: str, log_file: Path, control_fd: int) -> None:
        def child() -> None:
            os.setpgid(0, 0)
            self.control.close()
            os.close(self.lifeline_fd)
            warm_parent.run(file, Control(socket.socket(fileno=control_fd)), be_spare)

        pid = self._parent.fork(f"warm parent {unit}", log_file, child, die_with_parent=False)
        # Whoever of the two comes first: all that the unit's parent leaves behind is found by its process group.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self.control.event("forked", kind="warm_parent", unit=unit, pid=pid)

    def _fork_spare(self, log_file: Path, control_fd: int) -> None:
        def child() -> None:
            self.control.close()
            be_spare(self.fleet_file, Control(socket.socket(fileno=control_fd)), self.lifeline_fd)

        pid = self._parent.fork(SPARE_PARENT_TITLE, log_file, child, die_with_parent=False)
        self.control.event("forked", kind="spare", pid=pid)


def be_spare(fleet_file: str, control: Control, lifeline_fd: int) -> None:
    """Wait, in a process that has imported vLLM, until the controller wants it to take the place of the machine's
    parent, and serve then."""
    heartbeat = Heartbeat(heartbeat_file(Path(fleet_file).parent, "spare"))
    while not select.select([control], [], [], PERIOD_SECONDS)[0]:
        heartbeat.beat()
    heartbeat.close()
    if control.receive() is None:
        return  # the controller has gone
    set_title(VLLM_PARENT_TITLE)
    MachineParent(fleet_file, control, lifeline_fd).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches everyone; the controller decides
    log_to_stderr()
    fleet = load_fleet(args.fleet)
    local = [unit.unit_spec for unit in fleet.units if not unit.remote]
    os.environ.update(warm_parent.environment())
    control = Control(socket.socket(fileno=args.control_fd))
    try:
        device = local[0].device if local else "cpu"
        preload(device)
        warm_parent.register(fleet.models, device)
    except Exception as error:
        control.event("failed", kind="vllm", error=words(error))
        raise
    set_title(VLLM_PARENT_TITLE)
    MachineParent(args.fleet, control, args.lifeline_fd).run()


if __name__ == "__main__":
    main()
