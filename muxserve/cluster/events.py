"""What happens while a fleet starts, serves and stops; the command line renders it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["mps", "weights", "memory", "warm_parent", "unit", "gateway", "engine"]
_NAMES = {
    "mps": "MPS server",
    "memory": "memory manager",
    "warm_parent": "vLLM",
    "unit": "unit scheduler",
    "gateway": "gateway",
}


@dataclass(frozen=True)
class PartId:
    """One process of a deployment. Engines have a model and a phase, weight holders a model."""

    kind: Kind
    model: str = ""
    phase: str = ""

    def __str__(self) -> str:
        if self.kind == "engine":
            return f"engine {self.model}/{self.phase}"
        return f"weights of {self.model}" if self.kind == "weights" else _NAMES[self.kind]

    @property
    def log_names(self) -> tuple[str, ...]:
        """Its log files, under the deployment's log directory; the most telling one first."""
        if self.kind == "engine":
            # Weights are loaded by a process per model, so a failure may stand in that one's log.
            return f"engine-{self.model}-{self.phase}.log", f"model-{self.model}.log"
        return (f"weights-{self.model}.log" if self.kind == "weights" else f"{self.kind}.log",)


@dataclass(frozen=True)
class Starting:
    """A part is being started."""

    part: PartId


@dataclass(frozen=True)
class Progress:
    """A part tells what it does before it is up."""

    part: PartId
    detail: str


@dataclass(frozen=True)
class Up:
    """A part is ready to serve, `seconds` after its start."""

    part: PartId
    pid: int
    seconds: float


@dataclass(frozen=True)
class Down:
    """A part ended though it should not have; it is started again in `restart_in` seconds."""

    part: PartId
    reason: str
    restart_in: float


@dataclass(frozen=True)
class Ready:
    """Every part is up, `seconds` after the start of the deployment."""

    seconds: float


@dataclass(frozen=True)
class Draining:
    """The gateway takes no more requests; running ones have `seconds` to finish."""

    seconds: float


@dataclass(frozen=True)
class Stopping:
    """The remaining parts are being stopped."""


@dataclass(frozen=True)
class Failed:
    """The deployment ends because of `part`. `log` and its last lines may say more."""

    part: PartId
    message: str
    log: Path | None = None
    tail: tuple[str, ...] = ()


Event = Starting | Progress | Up | Down | Ready | Draining | Stopping | Failed
