"""What came of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxserve.metrics.records import RequestRecord
from muxserve.simulator.micro_batches import MicroBatches
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimUnit
from muxserve.simulator.timeline import JobTimeline


@dataclass(slots=True)
class EngineUse:
    """What one engine did: jobs (steps), tokens computed, seconds in which a job of it ran."""

    model: str
    phase: str
    jobs: int
    tokens: int
    busy_seconds: float


@dataclass(slots=True)
class ResidencyResult:
    """A unit whose models are not all awake: wakes, times that a model was put to sleep, requests that waited for a
    wake, and the most bytes that were taken on a device, those of models being woken included. `switches` are the times
    that a model was stopped while it had requests, to have its next turn later."""

    wakes: int
    sleeps: int
    waited: int
    peak_bytes: int
    switches: int = 0


@dataclass(slots=True)
class UnitRecord:
    """What happened in a unit since it `began`, until it `ended`: the `requests` that came, when the last of those
    ended, pages in use over time, and the seconds in which some job ran, of which those since `since` are not counted
    while one is `running`."""

    began: float
    ended: float | None = None
    requests: list[SimRequest] = field(default_factory=list)
    last_end: float = 0.0
    samples: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    busy: float = 0.0
    running: bool = False
    since: float = 0.0

    def works(self, running: bool, now: float) -> None:
        """Some job of the unit runs from now on, or none."""
        if self.running:
            self.busy += now - self.since
        self.running, self.since = running, now


@dataclass(slots=True)
class UnitResult:
    """What happened in a unit. `peak_pages` is the most that each of its models held. `turns` counts the scheduler's
    decisions, `looks` the events simulated. An engine over stages has `micro_batches`."""

    spec: SimUnit
    record: UnitRecord
    engines: list[EngineUse]
    pool_pages: dict[str, int]
    peak_pages: tuple[int, ...]
    turns: int
    looks: int
    timelines: list[JobTimeline] = field(default_factory=list, repr=False)
    micro_batches: MicroBatches | None = None
    residency: ResidencyResult | None = None

    @property
    def unit(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def device(self) -> str:
        """The type of its devices."""
        return self.spec.device

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return len(self.spec.devices)

    @property
    def models(self) -> tuple[str, ...]:
        """The names of its models."""
        return tuple(model.name for model in self.spec.models)

    @property
    def shapes(self) -> tuple[str, ...]:
        """The engines of each model, split or one."""
        return tuple("one" if model.profile.engines.both else "split" for model in self.spec.models)

    @property
    def rolling(self) -> bool:
        """Whether prefill rolls over it and others."""
        return self.spec.policy == "rolling"

    @property
    def requests(self) -> list[SimRequest]:
        """Those that came to it."""
        return self.record.requests

    @property
    def seconds(self) -> float:
        """From the start of the workload to the end of the last request."""
        return max(self.record.last_end, self.requests[-1].arrival if self.requests else 0.0)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which any job ran, of a pipeline the mean of its stages."""
        if self.micro_batches is None:
            return self.record.busy
        stages = self.stages
        return sum(stages) / len(stages)

    @property
    def pages(self) -> list[tuple[float, tuple[int, ...]]]:
        """Samples of pages in use: time and counts in the order of `models`."""
        return self.record.samples

    @property
    def waits(self) -> list[float]:
        """Seconds that each answered request waited for the phase switch: from its first token to the begin of its
        first decode step."""
        return [request.switch_wait for request in self.requests if request.finish is not None]

    @property
    def stages(self) -> list[float]:
        """Seconds in which each stage worked; none of an engine without stages."""
        return self.micro_batches.busy() if self.micro_batches is not None else []

    @property
    def active(self) -> float:
        """Seconds in which some stage had something in flight."""
        return self.micro_batches.active() if self.micro_batches is not None else 0.0

    @property
    def records(self) -> list[RequestRecord]:
        """What became of its requests."""
        return [request.record() for request in self.requests]

    @property
    def jobs(self) -> int:
        """Engine steps."""
        return sum(engine.jobs for engine in self.engines)


@dataclass(slots=True)
class ReplicasResult:
    """What the replicas of one model did together. `replica_seconds` sums over replicas the time from the decision to
    start them to their end. `migrations` arrived, `aborted` were given up. `downtimes` are the seconds in which
    requests that moved were in no batch, `copy_seconds` those from the first stage to the arrival. `peak` and `started`
    count replicas, `counts` has when their number changed, and to what; of rolling ones `moves` counts handles that
    went to another macro instance."""

    model: str
    seconds: float = 0.0
    replica_seconds: float = 0.0
    migrations: int = 0
    aborted: int = 0
    started: int = 0
    peak: int = 0
    moves: int = 0
    counts: list[tuple[float, int]] = field(default_factory=list)
    downtimes: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)

    @property
    def average(self) -> float:
        """Replicas that were paid for, on average."""
        return self.replica_seconds / self.seconds if self.seconds else 0.0

    @property
    def downtime(self) -> float | None:
        """Mean seconds in which a request that moved was in no batch; None of none."""
        return sum(self.downtimes) / len(self.downtimes) if self.downtimes else None


@dataclass(slots=True)
class FleetResult:
    """What happened. `records` and `requests` are in the order of the workload, `seconds` is when the last request
    ended."""

    requests: list[SimRequest]
    units: list[UnitResult]
    replicas: list[ReplicasResult] = field(default_factory=list)
    records: list[RequestRecord] = field(init=False)
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.records = [request.record() for request in self.requests]
        self.seconds = max((unit.seconds for unit in self.units), default=0.0)

    @property
    def jobs(self) -> int:
        """Engine steps."""
        return sum(unit.jobs for unit in self.units)

    @property
    def devices(self) -> int:
        """Devices that the units have; replicas that came, went and came again count once."""
        return sum({unit.unit: unit.devices for unit in self.units}.values())

    @property
    def gpu_seconds(self) -> float:
        """Device-seconds that the fleet occupied: every device for as long as its unit was there."""
        ends = ((unit, self.seconds if unit.record.ended is None else unit.record.ended) for unit in self.units)
        return sum(unit.devices * max(0.0, end - unit.record.began) for unit, end in ends)

    @property
    def busy_gpu_seconds(self) -> float:
        """Device-seconds in which some job ran."""
        return sum(unit.devices * unit.busy_seconds for unit in self.units)

    @property
    def timelines(self) -> list[JobTimeline]:
        """All that were kept."""
        return [timeline for unit in self.units for timeline in unit.timelines]
