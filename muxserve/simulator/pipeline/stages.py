"""Stages: which layers each has, how long a micro-batch takes there, and how much KV it can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from muxserve.costs import EngineCosts, LatencyModel, ModelArchitecture
from muxserve.costs.architecture import ITEM_BYTES, split_layers
from muxserve.simulator.pipeline.setup import PipelineSpec
from muxserve.simulator.setup import check_split

# Where attention takes nearly all of a prefill step, whatever the model.
_MANY_PAIRS = 1 << 40


@dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch as the stages see it. `prefill` prompt tokens of `prompts` prompts with `pairs` (query, key)
    pairs of attention; `decode` sequences with `context` tokens of KV between them, the new ones included."""

    prefill: int
    prompts: int
    pairs: int
    decode: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens that go through the linear layers."""
        return self.prefill + self.decode


def stage_architectures(architecture: ModelArchitecture, split: Sequence[int]) -> list[ModelArchitecture]:
    """The model's parts as models of their own. Only the last computes logits; looking up embeddings costs nothing."""
    return [
        replace(architecture, layers=layers, vocab=architecture.vocab if number == len(split) - 1 else 0)
        for number, layers in enumerate(split)
    ]


def kv_blocks(
    architecture: ModelArchitecture,
    dtype: str,
    stages: int,
    memory: Sequence[float],
    block_tokens: int = 16,
    split: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Blocks that each stage's KV cache can have. `memory` is what each stage has for weights and KV, bytes, of all its
    devices together; `split` says how many layers each has (None: `split_layers`).

    Raises:
        ValueError: the weights leave no room, or the lengths do not fit.
    """
    if split is None:
        split = split_layers(architecture.layers, stages)
    check_split(split, architecture.layers, stages)
    if len(memory) != stages:
        raise ValueError(f"{stages} stages have {len(memory)} memories")
    found = []
    for number, layers in enumerate(split):
        part = replace(architecture, layers=layers, tied_embeddings=True)
        # Embeddings lie on the first stage and the LM head on the last; on a single one both, unless they are tied.
        ends = (number == 0) + (number == stages - 1)
        if architecture.tied_embeddings and stages == 1:
            ends = 1
        matrix = architecture.vocab * architecture.hidden
        weights = (part.parameters + (ends - 1) * matrix) * ITEM_BYTES[dtype]
        room = memory[number] - weights
        blocks = int(room // (part.kv_bytes_per_token(dtype) * block_tokens))
        if blocks < 1:
            raise ValueError(
                f"stage {number} has {memory[number] / 2**30:.1f} GiB, of which its weights take "
                f"{weights / 2**30:.1f}: no room for a block"
            )
        found.append(blocks)
    return tuple(found)


class Stage:
    """One stage. `free_at` is when it has done all it was given, `blocks` its KV cache."""

    def __init__(self, costs: EngineCosts, blocks: int, layers: int) -> None:
        self.blocks = blocks
        self.layers = layers
        self.free_at = 0.0
        self._costs = costs
        longer = costs.prefill(1, 2 * _MANY_PAIRS, 1) - costs.prefill(1, _MANY_PAIRS, 1)
        self._pair_seconds = longer / _MANY_PAIRS

    def seconds(self, work: Work) -> float:
        """How long it computes that micro-batch.

        Latency models know steps of one kind. In a mixed one all tokens go through the linear layers together, which is
        a prefill of as many tokens, and decoding sequences read their KV beside it. That is counted as so many pairs of
        prefill attention as take the same time, so that a step that waits for the host waits only once.
        """
        if not work.decode:
            return self._costs.prefill(work.prefill, work.pairs, work.prompts)
        if not work.prefill:
            return self._costs.decode(work.decode, work.context).seconds(work.context)
        reading = self._costs.decode(work.decode, _MANY_PAIRS).per_token * work.context
        tokens, rows = work.tokens, work.prompts + work.decode
        if self._pair_seconds > 0.0:
            return self._costs.prefill(tokens, work.pairs + round(reading / self._pair_seconds), rows)
        return self._costs.prefill(tokens, work.pairs, rows) + reading


def make_stages(spec: PipelineSpec, latency: LatencyModel) -> list[Stage]:
    """The stages of that engine.

    Raises:
        CostError: the latency model does not know a part of the model on that device.
    """
    split = spec.layers or split_layers(spec.architecture.layers, spec.stages)
    return [
        Stage(latency.engine(part, spec.shape), blocks, part.layers)
        for part, blocks in zip(stage_architectures(spec.architecture, split), spec.blocks, strict=True)
    ]
