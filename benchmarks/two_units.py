"""Two real units of one model on this machine, whose gateway and global scheduler are played by the program itself.

Used by `migration.py` and by the tests of live migration. Every process of a unit is the real one; what is played is
who asks: requests are submitted with vLLM's own encoding, tokens are taken as they come, and requests are made to move
by saying that a replica is to be drained and paired with the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from muxserve import spec
from muxserve.cluster.events import Failed, Ready
from muxserve.cluster.host_link import ControllerEnd, HostEvent
from muxserve.costs.architecture import ITEM_BYTES
from muxserve.net import sockets
from muxserve.profiling.jobs import Bodies
from muxserve.replicas.priorities import ServiceClass
from muxserve.replicas.views import InstanceLoad
from muxserve.spec import ModelSpec, PoolSpec, UnitSpec
from muxserve.wire import (
    Cancel,
    GatewayHello,
    Loads,
    Lost,
    Message,
    Paired,
    Refused,
    RequestSpec,
    SchedulerHello,
    Submit,
    Terminating,
    TokensHeader,
    TookOver,
    UnitHello,
    Unpaired,
    decode,
    encode,
)

MODEL = "m"
PAIR_SECONDS = 0.1


@dataclass
class Seen:
    """What the client sees of a request: when each output token came, and from which engine. `tokens` are their ids,
    `moved_at` when another unit said that it has it. `early` are tokens that others have to come before, by their
    offset; the last may be among them when it has `ended`."""

    unit: str
    submitted: float
    prompt_tokens: int
    at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    moved_at: float = 0.0
    early: dict[int, list[int]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether all of its tokens are there."""
        return self.ended and not self.early

    def gaps(self, since: float = 0.0, until: float = float("inf")) -> list[float]:
        """Seconds between tokens whose later one came in that time."""
        pairs = zip(self.at, self.at[1:], strict=False)
        return [later - earlier for earlier, later in pairs if since <= earlier and later <= until]


def spec_of_unit(
    run_dir: Path, name: str, checkpoint: Path, *, max_len: int, blocks: int, threads: int = 1, **changes: Any
) -> UnitSpec:
    """A unit with one model, whose shape is read from its checkpoint."""
    shape = msgspec.json.decode((checkpoint / "config.json").read_bytes())
    layers, heads, head_dim = shape["num_hidden_layers"], shape["num_key_value_heads"], shape["head_dim"]
    model = ModelSpec(
        name=MODEL,
        path=str(checkpoint),
        pool="main",
        dtype="float32",
        layers=layers,
        kv_heads=heads,
        head_dim=head_dim,
        block_tokens=32,
        num_blocks=0,
        quota_pages=0,
        floor_pages=0,
        max_len=max_len,
        rate=1.0,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        prefix_caching=changes.pop("prefix_caching", False),
        threads=threads,
        prefill_share=0.5,
        decode_share=0.5,
        max_concurrency=64,
        max_queue=64,
    )
    return unit_of(run_dir, name, model, blocks, **changes)


def unit_of(run_dir: Path, name: str, model: ModelSpec, blocks: int, **changes: Any) -> UnitSpec:
    """A unit with that model and a pool of so many blocks."""
    pages = blocks * model.pages_per_block + 1
    model = msgspec.structs.replace(model, num_blocks=blocks + 1, quota_pages=pages, floor_pages=pages // 2)
    pool = PoolSpec(model.pool, 2 * model.block_tokens * model.head_dim * ITEM_BYTES[model.dtype], pages)
    return UnitSpec(str(run_dir), name, "adbs", 1, [pool], [model], **changes)


class Unit:
    """One of them, in processes of its own."""

    def __init__(self, unit_spec: UnitSpec, command: list[str], start: Callable[..., Any]) -> None:
        self.unit_spec = unit_spec
        self.name = unit_spec.unit
        run_dir = Path(unit_spec.run_dir)
        run_dir.mkdir(parents=True, mode=0o700)
        self.file = run_dir / "unit.json"
        spec.save(unit_spec, self.file)
        self.log = run_dir / "host.log"
        with self.log.open("wb") as log:
            self.process = start([*command, "--unit-spec", str(self.file), "--migrates"], stdout=log, stderr=log)

    def wait_ready(self) -> None:
        """Until everything is up."""
        asyncio.run(self._until_ready())

    async def _until_ready(self) -> None:
        events: list[HostEvent] = []
        host = ControllerEnd(self.unit_spec, events.append)
        try:
            while not any(isinstance(event, Ready) for event in events):
                if any(isinstance(event, Failed) for event in events) or self.process.poll() is not None:
                    words = f"{events[-3:]}, {self.log.read_text()[-2000:]}"
                    raise RuntimeError(f"unit {self.name} did not start: {words}")
                await asyncio.sleep(0.05)
        finally:
            host.close("it is up, or will not be")

    def close(self) -> None:
        """End it, with all its processes."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Pair:
    """The processes of both. A context manager: in it they are up. `start` stands in for `subprocess.Popen`."""

    def __init__(
        self,
        make: Callable[[str], UnitSpec],
        command: list[str] | None = None,
        start: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        command = command or [sys.executable, "-m", "muxserve.cluster.unit_host"]
        self.units = {name: Unit(make(name), command, start) for name in ("a", "b")}

    def __enter__(self) -> Pair:
        try:
            for unit in self.units.values():
                unit.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        for unit in self.units.values():
            unit.close()


class TwoUnits:
    """Who asks them, as their only gateway and global scheduler. A context manager; `pump` takes in what they say."""

    def __init__(self, pair: Pair) -> None:
        self.units = pair.units
        self.epoch = secrets.token_hex(4)
        self.requests: dict[str, Seen] = {}
        self.loads: dict[str, InstanceLoad] = {}
        self.lost: set[str] = set()
        self._context = zmq.Context()
        self._links: dict[tuple[str, str], zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._greeted: set[str] = set()
        self._count = 0
        self._moving = ""
        self._paired_at = 0.0

    def __enter__(self) -> Self:
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Say no more to them."""
        for link in self._links.values():
            link.close(linger=0)
        self._context.term()

    def _connect(self) -> None:
        run_dir = next(iter(self.units.values())).unit_spec.run_dir
        address = f"ipc://{run_dir}/tokens.sock"
        self._tokens = self._context.socket(zmq.PULL)
        sockets.bind_local(self._tokens, address)
        self._links["", "tokens"] = self._tokens
        for name, unit in self.units.items():
            for role, hello in (
                ("gateway", GatewayHello(self.epoch, address)),
                ("scheduler", SchedulerHello(self.epoch)),
            ):
                link = self._context.socket(zmq.DEALER)
                link.setsockopt(zmq.IDENTITY, f"{role}/{self.epoch}".encode())
                sockets.connect(link, unit.unit_spec.unit_address)
                link.send(encode(hello))
                self._links[name, role] = link
        for link in self._links.values():
            self._poller.register(link, zmq.POLLIN)
        self.pump(lambda: len(self._greeted) == 2 and len(self.loads) == 2)

    # ------------------------------------------------------------ messages

    def pump(self, until: Callable[[], bool], seconds: float = 120.0) -> None:
        """Take in messages until something is so. What has come is taken in at least once, however long it takes to see
        whether it is so.

        Raises:
            TimeoutError: it is not so in time.
        """
        end, left = time.monotonic() + seconds, seconds
        while not until():
            if left <= 0:
                raise TimeoutError(f"after {seconds:g} s: lost {sorted(self.lost)}")
            left = end - time.monotonic()
            ready = dict(self._poller.poll(min(max(left, 0.0), 0.05) * 1000))
            now = time.monotonic()
            if self._moving and now - self._paired_at > PAIR_SECONDS:
                self._pair(now)
            for (unit, role), link in self._links.items():
                if link in ready:
                    with contextlib.suppress(zmq.Again):
                        while True:
                            self._take(unit, role, link.recv_multipart(zmq.NOBLOCK), now)

    def wait(self, seconds: float) -> None:
        """Take in messages for so long."""
        end = time.monotonic() + seconds
        self.pump(lambda: time.monotonic() >= end, seconds + 1.0)

    def send(self, unit: str, role: str, message: Message) -> None:
        """As the gateway or the global scheduler."""
        self._links[unit, role].send(encode(message))

    def _take(self, unit: str, role: str, frames: list[bytes], now: float) -> None:
        message = decode(frames[0])
        match message:
            case TokensHeader():
                self._tokens_came(message, frames[1:], now)
            case UnitHello():
                self._greeted.add(unit)
            case Loads():
                for load in message.loads:
                    self.loads[unit] = load
            case TookOver():
                seen = self.requests.get(message.request_id)
                if seen is None:
                    self.send(unit, "gateway", Cancel([message.request_id]))
                else:
                    seen.unit, seen.moved_at = unit, now
            case Lost():
                # As a gateway does: what a unit says of requests that are another's is passed over.
                self.lost |= {r for r in message.request_ids if r in self.requests and self.requests[r].unit == unit}
            case Refused():
                self.lost.add(message.request_id)

    def _tokens_came(self, header: TokensHeader, frames: list[bytes], now: float) -> None:
        outputs = msgspec.msgpack.decode(frames[0])[1]
        for (request_id, _, offset), output in zip(header.entries, outputs, strict=True):
            seen = self.requests.get(request_id)
            if seen is None:
                continue
            # Two engines have two connections: the first token of one may overtake the last of the other.
            seen.early[offset] = output[1]
            seen.ended = seen.ended or (len(output) > 5 and output[5] is not None)
            for at in sorted(seen.early):
                if at <= len(seen.tokens):
                    new = seen.early.pop(at)[len(seen.tokens) - at :]
                    seen.tokens += new
                    seen.at += [now] * len(new)

    # ------------------------------------------------------------ requests

    def submit(self, unit: str, body: bytes, prompt_tokens: int, max_tokens: int, level: str = "normal") -> str:
        """Have a request served by that unit."""
        self._count += 1
        name = f"r{self._count}"
        self.requests[name] = Seen(unit, time.monotonic(), prompt_tokens)
        service = ServiceClass(scheduling=level, execution=level)
        request = RequestSpec(MODEL, body, prompt_tokens, max_tokens, service)
        message = Submit(name, 0, request, time.monotonic())
        self.send(unit, "gateway", message)
        return name

    def cancel(self, name: str) -> None:
        """Nobody wants it any more."""
        self.send(self.requests[name].unit, "gateway", Cancel([name]))

    def begin_moving(self, source: str) -> float:
        """Let the unit give a request away to the other one, whichever it chooses; returns when it was told."""
        now = time.monotonic()
        self.send(source, "scheduler", Terminating(MODEL, True))
        self._moving = source
        self._pair(now)
        return now

    def _pair(self, now: float) -> None:
        """With the newest load, as the global scheduler does in every round."""
        other = self.units["b" if self._moving == "a" else "a"]
        message = Paired(MODEL, other.name, other.unit_spec.migrator_address, self.loads[other.name])
        self.send(self._moving, "scheduler", message)
        self._paired_at = now

    def end_moving(self, source: str) -> None:
        """No more."""
        self._moving = ""
        self.send(source, "scheduler", Unpaired(MODEL))
        self.send(source, "scheduler", Terminating(MODEL, False))


def bodies(wanted: list[tuple[int, int, int]], vocabulary: int) -> list[list[bytes]]:
    """Requests in vLLM's encoding: for each (count, prompt tokens, output tokens), that many."""

    async def make() -> list[list[bytes]]:
        async with Bodies() as maker:
            return [await maker.make(count, prompt, output, vocabulary) for count, prompt, output in wanted]

    return asyncio.run(make())
