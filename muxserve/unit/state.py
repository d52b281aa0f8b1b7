"""What all parts of the unit scheduler work on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from muxserve.replicas.priorities import Levels
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.token_throttling import Throttle, prompt_tokens_ahead
from muxserve.scheduling.types import EngineSetup, KvLayout, ModelProfile, PoolProfile
from muxserve.spec import ModelSpec, UnitSpec
from muxserve.unit.memory import Memory
from muxserve.unit.timeline import UnitTimeline
from muxserve.wire import Message


@dataclass(slots=True)
class UnitState:
    """One unit, as its scheduler has it: the ledger, who decides, who is asked, and what is to be sent.

    `epoch` is this process, which came up at `started`; `levels` are those of each model. Replicas of the
    `terminating` models are being drained; `moving_in` and `moving_out` count requests on their way from and to other
    units. `timeline` is what was computed last.

    Raises:
        ValueError: the unit's spec contradicts itself.
    """

    unit_spec: UnitSpec
    policy: Policy
    memory: Memory
    epoch: str
    started: float
    ledger: UnitLedger = field(init=False)
    levels: dict[str, Levels] = field(init=False)
    messages: list[tuple[bytes, Message]] = field(default_factory=list)
    # The time of what is being handled.
    now: float = 0.0
    terminating: set[str] = field(default_factory=set)
    moving_in: dict[str, int] = field(default_factory=dict)
    moving_out: Counter[str] = field(default_factory=Counter)
    # Requests that gateways gave since the global scheduler was told of loads.
    came: list[str] = field(default_factory=list)
    timeline: UnitTimeline = field(default_factory=UnitTimeline)
    # Bytes that the pools may take, as the global scheduler has said; 0: nothing yet.
    room: int = 0

    def __post_init__(self) -> None:
        self.ledger = unit_ledger(self.unit_spec)
        self.ledger.memory_up = False
        self.levels = levels_of(self.unit_spec)

    @property
    def ranks(self) -> int:
        """Ranks of which each has the pools in the same memory."""
        return self.unit_spec.ranks if self.unit_spec.gpu is None else 1

    def join(self, unit_spec: UnitSpec, policy: Policy) -> list[ModelState]:
        """The unit is as `unit_spec` has it from now on, with models more, which are returned; `policy` begins anew,
        since models count in what it remembers."""
        new = self.ledger.join(profiles_of(unit_spec))
        self.unit_spec, self.policy, self.levels = unit_spec, policy, levels_of(unit_spec)
        self.memory.join(unit_spec)
        return new

    def send(self, peer: bytes, message: Message) -> None:
        """Have a message sent to the ZeroMQ identity `peer`, after all that were before."""
        self.messages.append((peer, message))

    def take_messages(self) -> list[tuple[bytes, Message]]:
        """What is to be sent, in order."""
        messages, self.messages = self.messages, []
        return messages


def model_profile(model: ModelSpec, elastic: bool = False) -> ModelProfile:
    """The profile of a deployed model, whose engines' shares may change (`elastic`)."""
    return ModelProfile(
        name=model.name,
        rate=model.rate,
        kv=KvLayout(
            model.pool,
            model.layers,
            model.kv_heads,
            model.block_tokens,
            state_blocks=model.state_blocks,
            window=model.window,
            windowed_layers=len(model.windowed_layers),
        ),
        engines=EngineSetup(
            model.prefill_share,
            model.decode_share,
            model.max_num_seqs,
            model.max_num_batched_tokens,
            both=model.shape == "one",
            depth=model.stages,
            waiting_tokens=_waiting_tokens(model),
            elastic=elastic,
        ),
        quota_pages=model.quota_pages,
        floor_pages=model.floor_pages,
        tokens=model.request_tokens,
        pooling=model.pooling,
    )


def _waiting_tokens(model: ModelSpec) -> int:
    """Prompt tokens that may be in an engine before they are computed."""
    throttle = Throttle() if model.stages > 1 else None
    return prompt_tokens_ahead(model.stages, model.max_num_batched_tokens, throttle)


def unit_ledger(unit_spec: UnitSpec) -> UnitLedger:
    """An empty ledger for the unit.

    Raises:
        ValueError: the unit's spec contradicts itself.
    """
    # The null page of a pool is never handed out.
    pools = [PoolProfile(pool.name, pool.num_pages - 1, pool.page_bytes) for pool in unit_spec.pools]
    return UnitLedger(profiles_of(unit_spec), pools)


def profiles_of(unit_spec: UnitSpec) -> list[ModelProfile]:
    """The models of a unit as its ledger has them."""
    elastic = unit_spec.share_steps > 0
    return [model_profile(model, elastic) for model in unit_spec.models]


def levels_of(unit_spec: UnitSpec) -> dict[str, Levels]:
    """The priority levels of each model."""
    return {model.name: unit_spec.priority_levels(model.name) for model in unit_spec.models}
