"""What is simulated: the model, its stages, and what lies between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxserve.costs import EngineShape, ModelArchitecture
from muxserve.simulator.setup import Link, check_split


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """One engine. `shape` is where each stage runs, on devices of its own. `blocks` counts, for each stage, the blocks
    of `block_tokens` tokens that its KV cache has for its own layers: its length is the number of stages. A sequence
    takes equally many of each, so that the smallest decides what the engine can hold. `layers` says how many each stage
    has (None: `costs.architecture.split_layers`). `links` lie between the stages where they differ, one less than
    those; without, each is `link`.

    `depth` micro-batches may be in flight (None: as many as stages). A micro-batch is made when the first stage can
    take it, or, with `ahead`, as soon as fewer than `depth` are in flight, as vLLM's batch queue does; then it knows
    less. With `chunk_ahead` the next chunk of a prompt may follow while the last one is still in the pipeline (vLLM,
    and gLLM since it was published); without, a prompt is in one micro-batch at a time (gLLM as it was published).

    `step_seconds` pass between the making of a micro-batch and its start on the first stage, `return_seconds` between
    its end on the last stage and its tokens being known where micro-batches are made. `max_num_seqs` sequences have
    begun and not ended.
    """

    architecture: ModelArchitecture
    shape: EngineShape
    blocks: tuple[int, ...]
    block_tokens: int = 16
    max_num_seqs: int = 1024
    link: Link = field(default_factory=Link)
    links: tuple[Link, ...] | None = None
    layers: tuple[int, ...] | None = None
    depth: int | None = None
    ahead: bool = False
    chunk_ahead: bool = True
    step_seconds: float = 0.0
    return_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError("each stage needs at least one block")
        if self.stages > self.architecture.layers:
            raise ValueError(f"{self.architecture.layers} layers cannot be spread over {self.stages} stages")
        if self.layers is not None:
            check_split(self.layers, self.architecture.layers, self.stages)
        if self.links is not None and len(self.links) != self.stages - 1:
            raise ValueError(f"{self.stages} stages have {self.stages - 1} links between them, not {len(self.links)}")
        if self.block_tokens < 1 or self.max_num_seqs < 1 or (self.depth is not None and self.depth < 1):
            raise ValueError("block_tokens, max_num_seqs and depth must be at least 1")
        if self.step_seconds < 0 or self.return_seconds < 0:
            raise ValueError("step_seconds and return_seconds must not be negative")

    @property
    def stages(self) -> int:
        """Their number."""
        return len(self.blocks)

    @property
    def in_flight(self) -> int:
        """Micro-batches that may be in flight, #PP_depth."""
        return self.depth or self.stages

    @property
    def capacity(self) -> int:
        """Tokens of KV that the engine can hold."""
        return min(self.blocks) * self.block_tokens
