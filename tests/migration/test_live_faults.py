"""Every process of two units, killed in every step of a migration: the client gets the same tokens, and no page leaks.

The units are real; gateway and global scheduler are played (`benchmarks/two_units.py`). A step lasts because the
process that it waits for is stopped, or copying is slow.

Usually every step is met, with one process each; when thorough every process and every step, but not each with each,
and one of them is stopped instead of killed. All that is 390 cases of seven to twenty seconds, which run with
MUXSERVE_EVERY_FAULT=1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.two_units import MODEL, Pair, TwoUnits
from muxserve.wire import (
    Cancel,
    GatewayHello,
    Lost,
    Message,
    SchedulerHello,
    StateReply,
    StateRequest,
    Submit,
    TokensHeader,
    TookOver,
    UnitHello,
    decode,
)
from tests.migration.conftest import BY_HEAD, CLASSES, LATENTS, STATES, STRUCK
from tests.migration.live import find, limit, process, used
from tests.support.patience import PATIENCE
from tests.support.requests import asking
from tests.support.thoroughness import cases

_, PROMPT, OUTPUT = STRUCK
# Bytes per second; a token has 2 KiB by head, and a little more as latents or beside states.
BANDWIDTH = 3e6
STEPS = ("showing", "copying", "last", "committing")
# Also with a model that keeps states.
STATE = "state"
PARTS = ("decode", "prefill", "migrator", "memory", "scheduler")
# Whoever is stopped for a step not to end. The last stage has to wait for the bandwidth of the first.
HELD_BY = {"showing": ("a", "decode"), "copying": ("b", "migrator"), "committing": ("b", "scheduler")}
VICTIMS = [f"{unit}-{part}" for part in PARTS for unit in "ab"]
KILLED, PAUSED, STOPPED = "killed", "stopped for 5 s", "stopped for good"
PAUSE_SECONDS = 5.0
EVERY = [
    (kind, step, victim, how)
    for kind in CLASSES
    for how in (KILLED, PAUSED, STOPPED)
    for step in (*STEPS, *([STATE] if kind == STATES else ()))
    for victim in VICTIMS
]
# The steps that everybody has, by class in turn: what differs is what is copied. While a state is copied again, source,
# destination and migrators.
SOME = sorted(
    [
        *(
            ((BY_HEAD, LATENTS, BY_HEAD, STATES)[number // 2 % 4], STEPS[number % len(STEPS)], victim, KILLED)
            for number, victim in enumerate(VICTIMS)
        ),
        (BY_HEAD, "copying", "a-migrator", STOPPED),
        *((STATES, STATE, victim, KILLED) for victim in ("a-decode", "a-migrator", "b-migrator", "b-memory")),
    ],
    key=lambda case: list(CLASSES).index(case[0]),
)
FEW = [
    (STATES, "last", "a-memory", KILLED),
    (STATES, STATE, "b-migrator", KILLED),
]
TRIES = 20
ASK_SECONDS = 0.004
GREET_SECONDS = 0.2


class Gateway(TwoUnits):
    """Plays a gateway in full: what is lost, or was with a unit scheduler that died, is submitted again."""

    def __init__(self, *arguments: Any) -> None:
        self.attempts: dict[str, int] = {}
        self.bodies: dict[str, bytes] = {}
        self.again: list[str] = []
        self.states: dict[str, Any] = {}
        self._epochs: dict[str, str] = {}
        self._asked_at = self._greeted_at = 0.0
        super().__init__(*arguments)

    def begin(self, unit: str, body: bytes) -> str:
        name = self.submit(unit, body, PROMPT, OUTPUT)
        self.bodies[name], self.attempts[name] = body, 0
        return name

    def until(self, wanted: Any, seconds: float = PATIENCE) -> None:
        """Pump until it is so, asking both units for their state, and greeting them as after a lost connection."""

        def there() -> bool:
            now = time.monotonic()
            if now - self._greeted_at > GREET_SECONDS:
                self._greeted_at = now
                for unit in self.units:
                    self.send(unit, "gateway", GatewayHello(self.epoch, self.tokens_address))
                    self.send(unit, "scheduler", SchedulerHello(self.epoch))
            if now - self._asked_at > ASK_SECONDS:
                self._asked_at = now
                for unit in self.units:
                    self.send(unit, "scheduler", StateRequest())
            return bool(wanted())

        # `pump` waits for messages for longer than a step may last.
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end, f"{self.states}\n{self.requests}\n{self._logs()}"
            with contextlib.suppress(TimeoutError):
                self.pump(lambda: bool(wanted()), ASK_SECONDS)

    def _logs(self) -> str:
        """The end of what each process of the units has logged."""
        files = [log for unit in self.units.values() for log in Path(unit.unit_spec.run_dir).rglob("*.log")]
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-1500:]}" for log in files)

    @property
    def tokens_address(self) -> str:
        return f"ipc://{next(iter(self.units.values())).unit_spec.run_dir}/tokens.sock"

    def _take(self, unit: str, role: str, frames: list[bytes], now: float) -> None:
        message = decode(frames[0])
        match message:
            case StateReply():
                self.states[unit] = message.state
            case UnitHello():
                self._unit_hello(unit, message)
                super()._take(unit, role, frames, now)
            case Lost():
                self._again([r for r in message.request_ids if self._is_at(r, unit)])
            case TookOver():
                seen = self.requests.get(message.request_id)
                if seen is not None and self.attempts[message.request_id] == message.attempt and not seen.finished:
                    super()._take(unit, role, frames, now)
                elif seen is None or seen.unit != unit:
                    self.send(unit, "gateway", Cancel([message.request_id]))
            case TokensHeader():
                attempts = {request_id: attempt for request_id, attempt, _ in message.entries}
                if all(self.attempts.get(r) == attempt for r, attempt in attempts.items()):
                    super()._take(unit, role, frames, now)
            case _:
                super()._take(unit, role, frames, now)

    def _unit_hello(self, unit: str, message: UnitHello) -> None:
        known, self._epochs[unit] = self._epochs.get(unit), message.epoch
        if known not in (None, message.epoch):
            self._again([r for r in self.requests if self._is_at(r, unit)])

    def _is_at(self, request_id: str, unit: str) -> bool:
        seen = self.requests.get(request_id)
        return seen is not None and seen.unit == unit and not seen.finished

    def _again(self, request_ids: list[str]) -> None:
        for name in request_ids:
            seen = self.requests[name]
            seen.early.clear()
            seen.ended = False
            self.attempts[name] += 1
            self.again.append(name)
            message: Message = Submit(
                name,
                attempt=self.attempts[name],
                request=asking(MODEL, PROMPT, OUTPUT, self.bodies[name]),
                arrival=time.monotonic(),
                output_tokens=seen.tokens,
            )
            self.send(seen.unit, "gateway", message)


@pytest.fixture(scope="module")
def units(pair: Pair) -> Iterator[Gateway]:
    limit(pair, BANDWIDTH)
    with Gateway(pair) as asking:
        yield asking


@pytest.fixture(scope="module")
def body(requests: dict[tuple[int, int, int], list[bytes]]) -> bytes:
    (made,) = requests[STRUCK]
    return made


@pytest.fixture(scope="module")
def expected(units: Gateway, body: bytes) -> list[int]:
    """What the request answers when nothing happens to it."""
    name = units.begin("b", body)
    units.until(lambda: units.requests[name].finished)
    assert len(units.requests[name].tokens) == OUTPUT
    return units.requests[name].tokens


def healthy(units: Gateway) -> bool:
    for unit in units.units:
        state = units.states.get(unit)
        if state is None or not state["memory_connected"]:
            return False
        if not all(engine["up"] for engine in state["engines"].values()):
            return False
        if find(units, unit, "migrator") is None:
            return False
    return True


def moves(units: Gateway) -> dict[str, int]:
    """What moves from the first unit wait for, as far as it has said."""
    found: dict[str, int] = units.states["a"]["models"][MODEL]["moves"]
    return found


@pytest.mark.parametrize(
    ("kind", "step", "victim", "how"),
    EVERY if os.environ.get("MUXSERVE_EVERY_FAULT") else cases(SOME, FEW),
    indirect=["kind"],
    scope="package",
)
def test_any_process_killed_or_stopped_in_any_step(
    units: Gateway, body: bytes, expected: list[int], step: str, victim: str, how: str
) -> None:
    units.states.clear()
    units.until(lambda: healthy(units))
    before = units.states["a"]["models"][MODEL]
    for _ in range(TRIES):
        name = units.begin("a", body)
        seen = units.requests[name]
        units.until(lambda seen=seen: len(seen.tokens) > 10)
        held = process(units, *HELD_BY[step]) if step in HELD_BY else None
        if held is not None:
            held.suspend()
        units.begin_moving("a")
        units.until(lambda seen=seen: step in moves(units) or seen.unit == "b" or seen.finished)
        if step in moves(units):
            break
        # The step was over before it was seen, or the request before it began to move.
        units.end_moving("a")
        if held is not None:
            held.resume()
        units.until(lambda seen=seen: seen.finished and not moving(units.states["a"]))
    else:
        pytest.fail(f"no move was met {step}")
    unit, part = victim.split("-")
    struck = process(units, unit, part)
    struck.send_signal(signal.SIGKILL if how == KILLED else signal.SIGSTOP)
    units.end_moving("a")
    if held is not None and held != struck:
        with contextlib.suppress(psutil.NoSuchProcess):
            held.resume()
    if how == PAUSED:
        end = time.monotonic() + PAUSE_SECONDS
        units.until(lambda: time.monotonic() > end)
    if how != STOPPED:
        with contextlib.suppress(psutil.NoSuchProcess):
            struck.resume()
    else:
        units.until(lambda: has_ended(struck))
    units.until(lambda: seen.finished)
    assert seen.tokens == expected
    assert units.again.count(name) <= 3
    units.again.clear()
    units.until(lambda: healthy(units))
    units.until(lambda: used(units) == 0)
    assert before["queued"] == 0
    # A unit scheduler learns that its migrator is another one when that greets it.
    units.until(lambda: not any(moving(state) for state in units.states.values()))


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def moving(state: dict[str, Any]) -> bool:
    (model,) = state["models"].values()
    return bool(model["moves"] or model["moving"])
