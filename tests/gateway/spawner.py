"""Imports vLLM once and forks what the tests need from that: the fake unit, and gateways.

python -m tests.gateway.spawner CONTROL_FD UNIT_FD
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable

from muxserve import spec
from muxserve.gateway import main as gateway
from muxserve.vllm.args import environment


def fork(child: Callable[[], None], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        child()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    control = socket.socket(fileno=int(sys.argv[1]))
    unit_control = socket.socket(fileno=int(sys.argv[2]))
    log_dir = sys.argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def tell(event: str, **fields: object) -> None:
        control.send(json.dumps({"event": event, **fields}).encode())

    os.environ.update(environment())
    gateway.preload()

    def fake_unit() -> None:
        from tests.gateway import fake_unit

        control.close()
        fake_unit.run(unit_control)

    fork(fake_unit, f"{log_dir}/unit.log")
    unit_control.close()
    from muxserve.vllm import gateway_internals

    tell("ready", problems=gateway_internals.problems(), moved=gateway_internals.problems("0.34.0"))
    children: dict[int, int] = {}
    lifelines: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    pid = children.pop(key.fd)
                    os.close(lifelines.pop(pid))
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    tell("exited", pid=pid, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    continue
                data = control.recv(1 << 16)
                if not data:
                    for pid in children.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                command = json.loads(data)
                if command["op"] == "cut":
                    os.close(lifelines[command["pid"]])
                    lifelines[command["pid"]] = os.open(os.devnull, os.O_RDONLY)
                    continue
                fleet = spec.load_fleet(command["fleet"])
                index = command["index"]
                lifeline, held = os.pipe()
                os.set_inheritable(lifeline, True)

                def child(
                    fleet: spec.FleetSpec = fleet,
                    index: int = index,
                    lifeline: int = lifeline,
                    held: int = held,
                    more: dict[str, str] = command["environment"],
                ) -> None:
                    os.environ.update(more)
                    for fd in (held, *lifelines.values()):
                        os.close(fd)
                    gateway.run(fleet, index, lifeline, lambda: tell("up", pid=os.getpid()))

                pid = fork(child, f"{log_dir}/{command['log']}")
                os.close(lifeline)
                lifelines[pid] = held
                fd = os.pidfd_open(pid)
                children[fd] = pid
                selector.register(fd, selectors.EVENT_READ)
                tell("forked", pid=pid)


if __name__ == "__main__":
    main()
    os._exit(0)
