"""What is simulated: units, their models and their pools; and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from muxserve.costs import ModelArchitecture
from muxserve.costs.calibration import LINKS, Graphs
from muxserve.costs.contention import Sharing
from muxserve.costs.latency import EngineShape
from muxserve.costs.profile import Overheads
from muxserve.scheduling.policies import DEFAULT_POLICY
from muxserve.scheduling.residency_types import ResidencyRules, WakeCosts
from muxserve.scheduling.token_throttling import TokenBudget, TokenThrottling
from muxserve.scheduling.turns import TurnRules
from muxserve.scheduling.types import ModelProfile, Phase, PoolProfile


@dataclass(frozen=True, slots=True)
class SimModel:
    """One model of a unit: what scheduling knows of it, and what its jobs cost.

    A lease takes `prefill_share` or `decode_share` of the unit, which the profile's engines have. `cost_share`, if
    given, is the share of each device on which jobs really run, whatever lease they run under. Requests whose prompt
    and output together are longer than `max_len` tokens (None: no limit of its own) are refused. `graphs` and `ahead`
    are as of `Demand`. With `prefix_caching` full blocks are kept for requests whose prompts begin with the same
    tokens.
    """

    profile: ModelProfile
    architecture: ModelArchitecture
    dtype: str
    cost_share: float | None = None
    max_len: int | None = None
    graphs: Graphs = "piecewise"
    prefix_caching: bool = True
    ahead: bool = False

    @property
    def name(self) -> str:
        """The model's name in the fleet."""
        return self.profile.name

    @property
    def counted(self) -> ModelProfile:
        """The profile by which admission and engine both count blocks: engines of both phases are simulated with whole
        ones. If admission counted less, it would let in again and again what the engine has no pages for."""
        profile = self.profile
        if not profile.engines.both:
            return profile
        return replace(profile, kv=replace(profile.kv, window=0, windowed_layers=0))


@dataclass(frozen=True, slots=True)
class Link:
    """From one stage to the next: `bandwidth` bytes per second, `latency` seconds. Sending holds up neither side, since
    it is asynchronous; what is sent arrives that much later.

    The default is PCIe 4.0 x16 between two GPUs, as in `costs.calibration`.
    """

    bandwidth: float = 32e9 * LINKS["pcie"].efficiency
    latency: float = LINKS["pcie"].latency

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or self.latency < 0:
            raise ValueError("a link needs a bandwidth above zero and a latency that is not negative")


def check_split(split: Sequence[int], layers: int, stages: int) -> None:
    """
    Raises:
        ValueError: these are not the model's layers, at least one for each stage.
    """
    if len(split) != stages or min(split) < 1 or sum(split) != layers:
        raise ValueError(f"{layers} layers over {stages} stages are not {', '.join(map(str, split))}")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How one engine's layers are spread over stages: how many each has. `links` lie between the stages, one less than
    those. `budget` makes what decides on a micro-batch, since budgets remember what they did.

    `depth` micro-batches may be in flight (None: as many as stages). A micro-batch is made when the first stage can
    take it, or, with `ahead`, as soon as fewer than `depth` are in flight, as vLLM's batch queue does; then it knows
    less. With `chunk_ahead` the next chunk of a prompt may follow while the last one is still in the pipeline (vLLM,
    and gLLM since it was published); without, a prompt is in one micro-batch at a time (gLLM as it was published).
    `return_seconds` pass between a micro-batch's end on the last stage and its tokens being known where micro-batches
    are made.
    """

    layers: tuple[int, ...]
    links: tuple[Link, ...]
    budget: Callable[[], TokenBudget] = TokenThrottling
    depth: int | None = None
    ahead: bool = False
    chunk_ahead: bool = True
    return_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers or min(self.layers) < 1:
            raise ValueError("each stage needs at least one layer")
        if len(self.links) != self.stages - 1:
            raise ValueError(f"{self.stages} stages have {self.stages - 1} links between them, not {len(self.links)}")
        if self.depth is not None and self.depth < 1:
            raise ValueError("depth must be at least 1")
        if self.return_seconds < 0:
            raise ValueError("return_seconds must not be negative")

    @property
    def stages(self) -> int:
        """Their number."""
        return len(self.layers)

    @property
    def in_flight(self) -> int:
        """Micro-batches that may be in flight, #PP_depth."""
        return self.depth or self.stages


@dataclass(frozen=True, slots=True)
class WakeContention:
    """How wakes and steps slow each other on a CPU, where a wake takes a core: it is longer by `drag` of its seconds
    for each other wake or busy model per core. Decoding gets `decode_weight` times as much as a wake of a core that
    both share. On GPUs weights are copied while the others compute."""

    drag: float = 0.0
    decode_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SimResidency:
    """By which rules models are awake, what each takes, and which are awake at first. Bytes are those of one device of
    the unit.

    A wake takes `WakeCosts.seconds`, and a sleep the rules' `sleep_seconds`. On GPUs the engines of as many models as
    `resting` says stay while they sleep, those of the models that slept last; a wake of such a model takes
    `started_seconds` less.

    With `turns` a model that has to go may stop before what it runs has ended; its KV stays as that of cached prefixes
    does."""

    rules: ResidencyRules
    models: dict[str, WakeCosts]
    awake: tuple[str, ...] = ()
    contention: WakeContention = WakeContention()
    turns: TurnRules | None = None
    resting: int = 0
    started_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SimUnit:
    """One unit. `devices` are the numbers, in the cluster, of its devices of type `device`; models are split over all
    of them, and page counts are per device.

    `policy` is a name of `muxserve.scheduling.policies`. Without `adapt_quotas` quotas stay as they are. Each model has
    an engine for each phase, or one of both (`EngineSetup.both`), in any mix. With a `pipeline` the engine of the
    unit's one model is split over groups of the devices, those of the first stage first; then pages are counted on a
    device of the stage with the most layers. With `residency` its models need not all be awake; else they are.
    Shares per lease come in `share_steps` sizes (0: in any). `sharing` is how
    processes share a GPU where leases overlap.
    """

    name: str
    device: str
    devices: tuple[int, ...]
    models: tuple[SimModel, ...]
    pools: tuple[PoolProfile, ...]
    policy: str = DEFAULT_POLICY
    adapt_quotas: bool = True
    pipeline: Pipeline | None = None
    residency: SimResidency | None = None
    share_steps: int = 0
    sharing: Sharing = "mps"

    def shape_of(self, model: SimModel, share: float, phase: Phase = Phase.BOTH) -> EngineShape:
        """Where an engine of one of its models runs, with that share of the compute."""
        ahead = model.ahead and self.tp == 1 and phase is not Phase.PREFILL
        return EngineShape(self.device, self.tp, share, model.dtype, model.graphs, ahead)

    @property
    def one_engine(self) -> bool:
        """Whether its models have one engine of both phases."""
        return all(model.profile.engines.both for model in self.models)

    @property
    def tp(self) -> int:
        """Over how many devices the tensors of a model are split."""
        return max(1, len(self.devices) // (self.pipeline.stages if self.pipeline is not None else 1))


@dataclass(frozen=True, slots=True)
class Options:
    """How to simulate. `sample_seconds` is how often page counts are recorded (0: never), `timeline` keeps every job,
    `load_tolerance` is by how much a job's load may change before others are told. Requests that have not ended `until`
    that time, in seconds, are left unfinished."""

    overheads: Overheads = field(default_factory=Overheads)
    sample_seconds: float = 1.0
    timeline: bool = False
    load_tolerance: float = 0.02
    until: float = float("inf")
