"""What is simulated: the instances, what migrations cost, and which policies decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from muxserve.costs import EngineShape, ModelArchitecture
from muxserve.replicas.dispatch import DispatchPolicy, FreestOfQueues
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import DEFAULT_LEVELS, Levels
from muxserve.replicas.scaling import ScalingRules


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One kind of instance. `blocks` of `block_tokens` tokens are its KV cache.

    A prefill step takes prompts of at most `max_num_batched_tokens` tokens together, or one longer prompt alone; a
    prompt is never cut. `watermark` is the part of the blocks that prompts leave free. `step_seconds` is added to
    every step.
    """

    architecture: ModelArchitecture
    shape: EngineShape
    blocks: int
    block_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    watermark: float = 0.01
    step_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.block_tokens < 1 or self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise ValueError("blocks, block_tokens, max_num_seqs and max_num_batched_tokens must be at least 1")

    @property
    def capacity(self) -> int:
        """Tokens of KV."""
        return self.blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class MigrationCosts:
    """Live migration in stages.

    A stage asks the destination for blocks (`handshake` seconds) and copies what the sequence has made since the last
    one at `bandwidth` bytes per second. When a stage has left at most `last_stage_blocks` to copy, or after
    `max_stages`, the sequence leaves the batch, the rest is copied, and `commit` seconds later it is in the
    destination's batch. Steps of both instances take `slowdown` times longer while one copies. A migration that does
    not get its blocks is given up.

    The defaults: Llumnix ran on VMs with 64 Gb/s between them, and copied through host memory with Gloo (sections 5 and
    6.1), for which half of that is taken. Downtimes of 20 to 30 ms in its figure 10 are a step under way plus the last
    stage; steps slow down by at most 1 % there. Stages are as in its release (`--migration-max-stages`,
    `--migration-last-stage-max-blocks`). What a round trip and a commit take is assumed.
    """

    bandwidth: float = 4e9
    handshake: float = 0.001
    commit: float = 0.002
    last_stage_blocks: int = 16
    max_stages: int = 3
    slowdown: float = 1.01

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"the bandwidth must be above zero bytes per second, not {self.bandwidth}")
        if self.handshake < 0 or self.commit < 0 or self.slowdown < 1:
            raise ValueError("handshake and commit must be zero or positive seconds, slowdown at least 1")
        if self.last_stage_blocks < 1 or self.max_stages < 1:
            raise ValueError("last_stage_blocks and max_stages must be at least 1")


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Policies and delays. `instances` are up at the start; with `scaling` more come, `start_seconds` after it is
    decided. The global scheduler's rounds are `tick` seconds apart; what it sees of the instances is `stale` seconds
    old at most (0: never). `dispatch` makes the policy, since some remember what they did."""

    instances: int = 16
    dispatch: Callable[[Levels], DispatchPolicy] = FreestOfQueues
    migration: MigrationRules | None = None
    scaling: ScalingRules | None = None
    levels: Levels = DEFAULT_LEVELS
    copying: MigrationCosts = field(default_factory=MigrationCosts)
    tick: float = 0.1
    stale: float = 0.0
    start_seconds: float = 15.0

    def __post_init__(self) -> None:
        if self.instances < 0 or not self.tick > 0 or self.stale < 0 or self.start_seconds < 0:
            raise ValueError("instances, stale and start_seconds must not be negative, and tick be above zero")
