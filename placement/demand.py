"""What is asked of a fleet: per model its architecture, load, lengths and latency objectives."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.calibration import Graphs
from placement.cluster import ShapeName


@dataclass(frozen=True, slots=True)
class Demand:
    """One model and its load: what the planner places, and what the simulator serves.

    `max_len` is its longest sequence in tokens (None: as the architecture says), `graphs` and `ahead` (of one device,
    and not of prefill engines) are as of `EngineShape`. With `prefix_caching` it keeps full blocks for prompts that
    begin with the same tokens.

    `rate` is requests per second of the whole fleet, `prompt_tokens` and `output_tokens` are means. `slo_ttft` and
    `slo_tpot` are seconds (None: no objective). `weight` is what a served request counts in the throughput objective.
    It is placed with `least` replicas at least and `most` at most (None: as many as are worth it), or not at all.
    `own_batch` says that somebody has chosen `max_num_seqs`; otherwise it is vLLM's default. `shape` is that of its
    engines, if somebody has chosen it.
    """

    name: str
    architecture: ModelArchitecture
    dtype: str = "bfloat16"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_len: int | None = None
    graphs: Graphs = "piecewise"
    prefix_caching: bool = True
    ahead: bool = False
    _: KW_ONLY
    rate: float = 1.0
    prompt_tokens: int = 512
    output_tokens: int = 256
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    weight: float = 1.0
    least: int = 1
    most: int | None = None
    own_batch: bool = True
    shape: ShapeName | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.least <= (self.least if self.most is None else self.most):
            raise ValueError(f"{self.name}: {self.least} to {self.most} replicas are none")
        if not self.rate > 0 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"{self.name}: rate, prompt_tokens and output_tokens must be above zero")

    @property
    def context(self) -> int:
        """Tokens of its longest sequence, prompt and answer."""
        return self.max_len or self.architecture.default_max_len

    @property
    def sequence_tokens(self) -> int:
        """Tokens of KV that a request in service holds on average: prompt and a whole output.

        The average over the time in service of prompt + tokens so far is p + E[o²] / (2 E[o]), which is p + E[o] where
        lengths spread as much as an exponential distribution, as those of chats do.
        """
        return self.prompt_tokens + self.output_tokens

    def may_have(self, replicas: int) -> bool:
        """Whether it may be placed with so many replicas."""
        return self.least <= replicas and (self.most is None or replicas <= self.most)

    @property
    def decode_steps(self) -> int:
        """Decode steps of a mean request; its first token comes from prefill."""
        return self.output_tokens - 1


class Mesh(NamedTuple):
    """A kind of mesh: `size` devices of type `device`, over which every model on it is split (tensor parallel)."""

    device: str
    size: int


class Member(NamedTuple):
    """A replica in a unit: of the demand numbered `model`, one of `replicas` that share its rate equally."""

    model: int
    replicas: int = 1


Members = tuple[Member, ...]


def splits_evenly(architecture: ModelArchitecture, tp: int) -> bool:
    """Whether `tp` devices can share the model: every device has whole query heads and MLP columns, and either whole
    KV heads or one that it shares with others, as in vLLM; of layers with states, whole heads and their groups."""
    kv, states = architecture.kv_heads, architecture.states
    return (
        architecture.heads % tp == 0
        and (kv % tp == 0 or tp % kv == 0)
        and (architecture.intermediate % tp == 0 or architecture.experts > 1)
        and (states is None or states.heads.split_over(tp))
    )
