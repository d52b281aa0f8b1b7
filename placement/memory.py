"""What a device's memory goes to besides the page pool: weights, activations, process contexts.

The sizes of contexts and of what vLLM holds aside are assumptions from public figures; nothing here has been measured
on a GPU of this project's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from muxserve.costs.architecture import ITEM_BYTES
from placement.demand import Demand

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """`utilisation` is the part of a device's memory that may be planned, vLLM's gpu_memory_utilization.

    `context_bytes` is what one process holds on each device before it does anything: CUDA context, libraries, NCCL
    buffers (300 to 600 MiB by common experience). A model has `processes` of them. `graph_bytes` is for the CUDA graphs
    of one engine, which has `graph_sets` of them; `engines` of a model have graphs and activations of their own at the
    same time. `reserve_bytes` of each device are for the memory manager and for what nobody has thought of.
    """

    utilisation: float = 0.92
    context_bytes: int = 500 * _MIB
    processes: int = 2
    graph_bytes: int = 500 * _MIB
    engines: int = 1
    reserve_bytes: int = 0
    graph_sets: int = 1

    def graphs(self, demand: Demand) -> int:
        """Bytes of the CUDA graphs of one engine of the model."""
        return 0 if demand.graphs == "eager" else self.graph_sets * self.graph_bytes

    def resting_bytes(self, demand: Demand) -> int:
        """Bytes of a model's engines without weights and activations, while their model sleeps."""
        return self.engines * self.graphs(demand) + self.processes * self.context_bytes

    @classmethod
    def served(cls, utilisation: float = 0.92, engines: int = 2, graph_sets: int = 1) -> MemoryRules:
        """What `muxserve deploy` sets aside: the processes of a model are its engines (two; one where an engine has
        both phases), which keep the memory of their largest step. Who has loaded its weights ends before they start."""
        return cls(utilisation, processes=engines, engines=engines, reserve_bytes=1024 * _MIB, graph_sets=graph_sets)

    def of(self, demand: Demand) -> MemoryRules:
        """The rules for a model by its shape; one that answers with vectors has one engine, whatever that says."""
        return self.of_one_engine() if demand.shape == "one" or demand.architecture.pooling else self

    def of_one_engine(self) -> MemoryRules:
        """The rules for models of which one engine does both phases: one process with one context and its graphs."""
        return replace(self, engines=1, processes=1)


def activation_bytes(demand: Demand, tp: int) -> int:
    """Bytes on each device at the peak of the largest prefill step, plus the logits of a full batch.

    Live at once in a layer: the residual stream, its normalised copy, queries, keys and values or gate, up and down
    projections; half as much again for what the allocator cannot use.
    """
    a = demand.architecture
    item = ITEM_BYTES[demand.dtype]
    attention = a.attention_numbers(tp)
    mlp = 3 * a.intermediate / tp
    tokens = demand.max_num_batched_tokens * (3 * a.hidden + max(attention, mlp)) * item
    logits = demand.max_num_seqs * a.vocab * 4
    return int(1.5 * (tokens + logits))


def model_bytes(demand: Demand, tp: int, rules: MemoryRules) -> int:
    """Bytes on each device for one model before its first token of KV. Prefill and decode engine share the weights."""
    engine = activation_bytes(demand, tp) + rules.graphs(demand)
    return weight_bytes(demand, tp) + rules.engines * engine + rules.processes * rules.context_bytes


def weight_bytes(demand: Demand, tp: int, stages: int = 1) -> int:
    """Bytes of a model's weights on each device; with `stages` of a pipeline, on those of the stage with the most. The
    first has the embeddings and the last the LM head, both perhaps as many layers as any other."""
    a, whole = demand.architecture, demand.architecture.weight_bytes(demand.dtype)
    if stages > 1:
        end = a.vocab * a.hidden * ITEM_BYTES[demand.dtype]
        layers = whole - end * (1 if a.tied_embeddings else 2)
        whole = end + layers * math.ceil(a.layers / stages) // a.layers
    return int(whole / tp)


def sequence_bytes(demand: Demand, tp: int) -> float:
    """Bytes of KV and states on each device of one request in service. Devices beyond the KV heads hold copies."""
    heads = demand.architecture.kv_heads
    held = max(1.0, heads / tp) / heads
    kv = demand.sequence_tokens * demand.architecture.kv_bytes_per_token(demand.dtype) * held
    return kv + demand.architecture.state_bytes(demand.dtype, tp)
