"""What happens while a fleet starts, serves and stops; the command line renders it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

Kind = Literal[
    "mps",
    "weights",
    "memory",
    "warm_parent",
    "model",
    "unit",
    "migrator",
    "engine",
    "host",
    "vllm",
    "spare",
    "gateway",
    "scheduler",
]
_NAMES = {
    "mps": "MPS server",
    "memory": "memory manager",
    "warm_parent": "warm parent",
    "unit": "unit scheduler",
    "host": "unit",
    "vllm": "vLLM",
    "spare": "spare vLLM",
    "scheduler": "global scheduler",
}


@dataclass(frozen=True)
class PartId:
    """One process of a fleet. Engines have a model and a phase, weight holders a model, gateways a number.

    `unit` is told where a fleet has several; `host` is a unit as a whole.
    """

    kind: Kind
    model: str = ""
    phase: str = ""
    unit: str = ""
    index: int = 0

    def __str__(self) -> str:
        if self.kind == "host":
            return f"unit {self.unit}".rstrip()
        return f"{self.unit}: {self._alone}" if self.unit else self._alone

    @property
    def _alone(self) -> str:
        if self.kind == "engine":
            return f"engine {self.model}/{self.phase}"
        if self.kind == "gateway":
            return f"gateway {self.index}" if self.index else "gateway"
        if self.kind == "model":
            return f"parent of {self.model}"
        return f"weights of {self.model}" if self.kind == "weights" else _NAMES.get(self.kind, self.kind)

    @property
    def file_name(self) -> str:
        """What its own files are called: its heartbeat, and most of all its log."""
        if self.kind == "engine":
            return f"engine-{_file_name(self.model)}-{self.phase}"
        if self.kind in ("weights", "model"):
            return f"{self.kind}-{_file_name(self.model)}"
        return f"gateway-{self.index}" if self.kind == "gateway" else self.kind

    def within(self, unit: str) -> PartId:
        """The same part, told apart from those of other units."""
        return replace(self, unit=unit)

    @property
    def log_names(self) -> tuple[str, ...]:
        """Its log files, under the log directory of its unit or, if it belongs to none, of the fleet; the most telling
        one first."""
        if self.kind == "engine":
            # Weights are loaded by a process per model, so a failure may stand in that one's log.
            return f"{self.file_name}.log", f"model-{_file_name(self.model)}.log"
        return (f"{self.file_name}.log",)


def _file_name(model: str) -> str:
    return model.replace("/", "_")


HOST = PartId("host")


class BaseEvent(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """Base of every event; a message may have one of several."""


class Expected(BaseEvent, frozen=True):
    """These parts are going to be started."""

    parts: tuple[PartId, ...]


class Starting(BaseEvent, frozen=True):
    """A part is being started."""

    part: PartId


class Progress(BaseEvent, frozen=True):
    """A part tells what it does before it is up."""

    part: PartId
    detail: str


class Up(BaseEvent, frozen=True):
    """A part is ready to serve, `seconds` after its start."""

    part: PartId
    pid: int
    seconds: float


class Down(BaseEvent, frozen=True):
    """A part ended though it should not have; it is started again in `restart_in` seconds. `failed_starts` are those in
    a row since it was up. `hung`: it was killed since it gave no sign of life."""

    part: PartId
    reason: str
    restart_in: float
    failed_starts: int = 0
    hung: bool = False


class Suspected(BaseEvent, frozen=True):
    """A part has given no sign of life for `seconds`. It gets no new work, and is killed if that goes on."""

    part: PartId
    seconds: float


class Recovered(BaseEvent, frozen=True):
    """A part that was suspected gives signs of life again, or has ended."""

    part: PartId


class Ready(BaseEvent, frozen=True):
    """Every part of the fleet, or of a unit, is up, `seconds` after its start."""

    seconds: float


class Draining(BaseEvent, frozen=True):
    """The gateways take no more requests; running ones have `seconds` to finish. `cause`: what asked for the end."""

    seconds: float
    cause: str = ""


class Stopping(BaseEvent, frozen=True):
    """The remaining parts are being stopped, if `cause` says so because that asked for the end."""

    cause: str = ""


class Failed(BaseEvent, frozen=True):
    """The fleet, or the unit, ends because of `part`. `log` and its last lines may say more."""

    part: PartId
    message: str
    log: str = ""
    tail: tuple[str, ...] = ()


Event = Expected | Starting | Progress | Up | Down | Suspected | Recovered | Ready | Draining | Stopping | Failed


def of_unit(event: Event, unit: str) -> Event:
    """The same event, told apart from those of other units."""
    part = getattr(event, "part", None)
    return event if part is None else msgspec.structs.replace(event, part=part.within(unit))
