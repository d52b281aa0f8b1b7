"""The unit scheduler process: `python -m muxserve.unit.scheduler --unit-spec PATH`.

A ZeroMQ ROUTER and a loop around `UnitExecutor`: it takes in every message that is there, decides once, and sends. An
arrival to an idle unit is granted in the same turn.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import secrets
import sys
import time

import msgspec
import zmq

from muxserve import spec
from muxserve.gpu.watch import GpuWatch
from muxserve.net.heartbeat import PERIOD_SECONDS, Heartbeat, heartbeat_file
from muxserve.net.inbox import Inbox
from muxserve.net.process import Signals, die_with_parent, log_to_stderr
from muxserve.net.sockets import NetworkError, bind_local, bind_tcp, tcp_address
from muxserve.scheduling.policies import make_policy
from muxserve.spec import UnitSpec
from muxserve.unit.executor import UnitExecutor
from muxserve.unit.memory import Memory, MemoryLink
from muxserve.unit.outbox import shown
from muxserve.wire import AnyMessage, decode, encode

log = logging.getLogger("muxserve.unit")

# Messages taken in before a decision is made: enough to decide on a burst as a whole, few enough to be quick.
BATCH = 64


def serve(unit_spec: UnitSpec, memory: Memory) -> None:
    """Run the unit scheduler until SIGTERM.

    Raises:
        zmq.ZMQError: the unit's address cannot be bound.
        NetworkError: it is to be reached from other machines, and cannot be.
        ValueError: the unit's spec contradicts itself.
    """
    signals = Signals()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.RCVHWM, 0)
    # A peer that was started again takes over the identity of the one that died.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    epoch = secrets.token_hex(8)
    # The gateways of this machine ask for its GPUs themselves.
    gpus = GpuWatch(unit_spec).states if unit_spec.gpu is not None and unit_spec.listen is not None else None
    executor = UnitExecutor(unit_spec, make_policy(unit_spec.policy), memory, epoch, time.monotonic(), gpus)
    bind_local(router, unit_spec.unit_address)
    if unit_spec.listen is not None and unit_spec.keys is not None:
        port = bind_tcp(router, unit_spec.listen.host, unit_spec.listen.unit_port, unit_spec.keys)
        log.info("other machines reach it at %s", tcp_address(unit_spec.listen.host, port))
    inbox = Inbox(log, decode)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(signals.fileno(), zmq.POLLIN)
    heartbeat = Heartbeat(heartbeat_file(unit_spec.run_dir, "unit"))
    log.info("unit %s, policy %s, epoch %s", unit_spec.unit, unit_spec.policy, epoch)
    # What exists now stays; looking at it again and again would only lengthen the pauses.
    gc.collect()
    gc.freeze()
    try:
        while True:
            heartbeat.beat()
            now = time.monotonic()
            wait = min(max(executor.wakeup(now) - now, 0.0), PERIOD_SECONDS)
            # Rounded up: waking a little early would only mean to wait again.
            ready = dict(poller.poll(math.ceil(wait * 1000)))
            if signals.fileno() in ready:
                log.info("stopped")
                return
            # One moment for the whole turn: what is granted in the turn in which it became possible has not waited.
            now = time.monotonic()
            _take_in(router, inbox, executor, now)
            for peer, message in executor.turn(now):
                router.send_multipart((peer, encode(message)), zmq.NOBLOCK, copy=True)
    finally:
        router.close()
        context.term()


def _take_in(router: zmq.Socket[bytes], inbox: Inbox[AnyMessage], executor: UnitExecutor, now: float) -> None:
    for _ in range(BATCH):
        try:
            frames = router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        peer = frames[0]
        if len(frames) != 2 or not frames[1]:
            inbox.drop("frames", f"a message of {len(frames) - 1} frames from {shown(peer)} ignored")
            continue
        message = inbox.read(frames[1], peer)
        if message is not None:
            inbox.handle(message, peer, executor.handle, peer, message, now)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 stopped, 2 bad input, 3 could not start."""
    parser = argparse.ArgumentParser(prog="python -m muxserve.unit.scheduler", description="The unit scheduler.")
    parser.add_argument("--unit-spec", required=True, help="unit.json, written by the controller")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the process that started this ends")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    options = parser.parse_args(arguments)
    if options.die_with_parent and not die_with_parent():
        return 0
    log_to_stderr(options.log_level)
    try:
        unit_spec = spec.load(options.unit_spec)
    except (OSError, msgspec.DecodeError) as error:
        print(f"{options.unit_spec}: not a unit's spec: {error}", file=sys.stderr)
        return 2
    try:
        serve(unit_spec, MemoryLink(unit_spec))
    except ValueError as error:
        print(f"{options.unit_spec}: {error}", file=sys.stderr)
        return 2
    except zmq.ZMQError as error:
        print(f"cannot listen on {unit_spec.unit_address}: {error}", file=sys.stderr)
        return 3
    except NetworkError as error:
        print(f"unit {unit_spec.unit} cannot be reached: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
