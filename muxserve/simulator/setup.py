"""What is simulated: units, their models, their pools, and the delays of the control path."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxserve.costs import ModelArchitecture
from muxserve.scheduling.types import ModelProfile, PoolProfile


@dataclass(frozen=True, slots=True)
class SimModel:
    """One model of a unit: what scheduling knows of it, and what its jobs cost.

    `profile.prefill_share` and `decode_share` are what a lease takes of the unit. `cost_share`, if given, is the share
    of each device on which jobs really run, whatever lease they run under. Requests whose prompt and output together
    are longer than `max_len` tokens (None: no limit of its own) are refused.
    """

    profile: ModelProfile
    architecture: ModelArchitecture
    dtype: str
    cost_share: float | None = None
    max_len: int | None = None

    @property
    def name(self) -> str:
        """The model's name in the fleet."""
        return self.profile.name


@dataclass(frozen=True, slots=True)
class SimUnit:
    """One unit. `devices` are the numbers, in the cluster, of its devices of type `device`; models are split over all
    of them, and page counts are per device.

    `policy` is a name of `muxserve.scheduling.policies`. Without `adapt_quotas` quotas stay as they are. A `combined`
    unit has no scheduler: each model is one engine that prefills and decodes by itself, as stock vLLM does.
    """

    name: str
    device: str
    devices: tuple[int, ...]
    models: tuple[SimModel, ...]
    pools: tuple[PoolProfile, ...]
    policy: str = "adbs"
    adapt_quotas: bool = True
    combined: bool = False

    @property
    def tp(self) -> int:
        """Over how many devices each model is split."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Overheads:
    """Delays of the control path, in seconds; all 0 unless they were measured.

    `request`: from the client to the unit's queue. `lease`: from a decision to the engine. `report`: from an engine to
    the unit scheduler. `prefill_step` and `decode_step`: added to every step. `token`: from an engine to the client.
    `stall`: a step that finds no pages.
    """

    request: float = 0.0
    lease: float = 0.0
    report: float = 0.0
    prefill_step: float = 0.0
    decode_step: float = 0.0
    token: float = 0.0
    stall: float = 0.001

    def __post_init__(self) -> None:
        for name in ("request", "lease", "report", "prefill_step", "decode_step", "token"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"the overhead {name!r} must be zero or positive seconds, not {getattr(self, name)}")
        if not self.stall > 0.0:
            raise ValueError(f"the overhead 'stall' must be above zero seconds, not {self.stall}")


@dataclass(frozen=True, slots=True)
class Options:
    """How to simulate. `sample_seconds` is how often page counts are recorded (0: never), `timeline` keeps every job,
    `load_tolerance` is by how much a job's load may change before others are told."""

    overheads: Overheads = field(default_factory=Overheads)
    sample_seconds: float = 1.0
    timeline: bool = False
    load_tolerance: float = 0.02
