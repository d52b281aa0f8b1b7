"""States of sequences on the pages of the unified pool, for Mamba-2 and gated delta nets on GPUs.

A GPU cannot map pages one by one to where a kernel would find a state in one piece, as engines on CPU do. So a decode
step computes on the pages themselves: a token changes each row of a head's state by itself, and a page holds whole
rows. Prompts are computed by vLLM's kernels, which want states in one piece: a layer's are copied out of the pages
before and back behind, which is little beside computing the tokens. So are those of a step with both, and those of a
pool in which a page ends within a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from muxserve.engine.cuda import kernels
from muxserve.engine.cuda.page_table import DevicePageTable
from muxserve.engine.states import StateSlots
from muxserve.vllm.args import STATE_PROMPTS
from muxserve.vllm.cuda_internals import check_states

# How many times as much memory as a batch's states in one layer its prompts take: copied out of the pages, and what
# vLLM's kernels begin with and end with.
COPIES = 3
_WORD = 4


@dataclass(frozen=True)
class StatePlace:
    """Where a layer's state lies in a sequence's: from the page `first` on, the matrices, and behind them the last
    inputs of the convolution, as vLLM has them. A step takes `tile` rows of a matrix at a time; 0: it cannot."""

    first: int
    page_bytes: int
    matrices: torch.Size
    matrix_type: torch.dtype
    inputs: torch.Size
    input_type: torch.dtype
    tile: int

    @classmethod
    def of(cls, spec: MambaSpec, first: int, page_bytes: int) -> StatePlace:
        """That of a layer which `spec` describes."""
        inputs, matrices = (torch.Size(shape) for shape in spec.shapes)
        input_type, matrix_type = spec.dtypes
        _, rows, width = matrices
        tile = kernels.tile_rows(page_bytes // matrix_type.itemsize, rows, width)
        return cls(first, page_bytes, matrices, matrix_type, inputs, input_type, tile)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices of all heads."""
        return self.matrices.numel() * self.matrix_type.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        return self.matrix_bytes + self.inputs.numel() * self.input_type.itemsize

    @property
    def pages(self) -> int:
        """Pages that it takes."""
        return -(-self.bytes // self.page_bytes)

    @property
    def first_input(self) -> int:
        """Where the inputs of the convolution begin, counted in numbers of their type from the sequence's beginning."""
        return (self.first * self.page_bytes + self.matrix_bytes) // self.input_type.itemsize


def places_of(specs: Mapping[str, MambaSpec], page_bytes: int) -> dict[str, StatePlace]:
    """One layer's state behind the other's, each from a page's beginning on."""
    places: dict[str, StatePlace] = {}
    first = 0
    for name, spec in specs.items():
        places[name] = StatePlace.of(spec, first, page_bytes)
        first += places[name].pages
    return places


class PagedStates(StateSlots):
    """Slots for the states of `sequences` sequences, of the layers in `specs`. `table` int32 [slots, pages] on the
    device has the pages of each slot."""

    def __init__(self, specs: Mapping[str, MambaSpec], sequences: int, page_bytes: int, device: torch.device) -> None:
        self.places = places_of(specs, page_bytes)
        taken = sum(place.pages for place in self.places.values())
        super().__init__(sequences, taken)
        self._rows = np.zeros((self.count, taken), np.int32)
        self._table = DevicePageTable(self._rows, device)
        self._pool: torch.Tensor | None = None
        self._renumbered: tuple[Any, Any] | None = None

    @property
    def table(self) -> torch.Tensor:
        """See above."""
        return self._table.table

    def bind(self, pool: torch.Tensor, layers: Mapping[str, Any]) -> None:
        """From now on the states lie in `pool`, uint8 [pages, page bytes], and `layers`, by name, find them there."""
        self._pool = pool
        for name, place in self.places.items():
            delta_net = layers[name].mamba_type == MambaAttentionBackendEnum.GDN_ATTN
            (DeltaNetCore if delta_net else StateSpaceCore).put_into(layers[name], place, self)

    def pool_of(self, dtype: torch.dtype) -> torch.Tensor:
        """The pool as numbers of a type, [pages, numbers]."""
        assert self._pool is not None, "the pool was bound"
        return self._pool.view(dtype)

    def renumbered(self, meta: Any) -> Any:
        """A step's `meta` with the states of its sequences in order, from 1 on; made once for all layers."""
        if self._renumbered is None or self._renumbered[0] is not meta:
            self._renumbered = meta, _renumbered(meta)
        return self._renumbered[1]

    def place(self, come: Mapping[int, npt.NDArray[np.int64]]) -> None:
        for slot, pages in come.items():
            self._rows[slot] = pages
        self._table.update([*come])

    def copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        assert self._pool is not None, "the pool was bound"
        one, other = (torch.from_numpy(pages).to(self._pool.device) for pages in (source, target))
        self._pool[other] = self._pool[one]


class StateCore:
    """What a layer computes with its state, in place of a method of vLLM's layer."""

    METHOD: str

    def __init__(self, layer: Any, place: StatePlace, states: PagedStates) -> None:
        self.layer, self.place, self.states = layer, place, states

    @classmethod
    def put_into(cls, layer: Any, place: StatePlace, states: PagedStates) -> None:
        """Have `layer` call it."""
        setattr(layer, cls.METHOD, cls(layer, place, states))

    def stock(self, *given: torch.Tensor) -> Any:
        """vLLM's method, on states in one piece."""
        return getattr(type(self.layer), self.METHOD)(self.layer, *given)

    def metadata(self) -> Any:
        """That of the step; None while vLLM warms up."""
        known = get_forward_context().attn_metadata
        return known.get(self.layer.prefix) if isinstance(known, dict) else None

    def in_one_piece(self, slots: torch.Tensor, *given: torch.Tensor) -> Any:
        """`stock` with the states of `slots` [R] copied together."""
        place, count = self.place, slots.shape[0] + 1
        device = self.states.table.device
        inputs = torch.zeros((count, *place.inputs), dtype=place.input_type, device=device)
        matrices = torch.zeros((count, *place.matrices), dtype=place.matrix_type, device=device)
        parts = ((matrices, 0), (inputs, place.matrix_bytes))
        self._copy(parts, slots, to_pool=False)
        known = get_forward_context().attn_metadata
        assert isinstance(known, dict)
        meta = known[self.layer.prefix]
        self.layer.kv_cache = (inputs, matrices)
        known[self.layer.prefix] = self.states.renumbered(meta)
        try:
            result = self.stock(*given)
        finally:
            known[self.layer.prefix] = meta
            self.layer.kv_cache = ()
        self._copy(parts, slots, to_pool=True)
        return result

    def _copy(self, parts: tuple[tuple[torch.Tensor, int], ...], slots: torch.Tensor, to_pool: bool) -> None:
        pool, begin = self.states.pool_of(torch.int32), self.place.first * self.place.page_bytes
        for tensor, behind in parts:
            words = tensor[1:].flatten(1).view(torch.int32)
            kernels.copy_states(pool, self.states.table, slots, words, (begin + behind) // _WORD, to_pool)

    def convolved(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slots: Any) -> Any:
        """One token of the convolution that comes first."""
        place, states = self.place, self.states
        pool = states.pool_of(place.input_type)
        dim_first = is_conv_state_dim_first()
        return kernels.convolve_step(
            inputs, weight, bias, pool, states.table, slots, place.first_input, channels_first=dim_first
        )


class DeltaNetCore(StateCore):
    """That of a gated delta net."""

    METHOD = "_forward_core"

    @property
    def weight(self) -> torch.Tensor:
        """The convolution's weight, [channels, inputs]."""
        weight: torch.Tensor = self.layer.conv1d.weight
        return weight.view(weight.size(0), -1)

    def __call__(self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor) -> Any:
        meta = self.metadata()
        if meta is None:
            return self.stock(mixed_qkv, b, a, core_attn_out)
        if meta.num_prefills or not self.place.tile:
            slots = meta.non_spec_state_indices_tensor[: meta.num_decodes + meta.num_prefills]
            return self.in_one_piece(slots, mixed_qkv, b, a, core_attn_out)
        if not meta.num_decodes:
            return None
        layer, place, states = self.layer, self.place, self.states
        tokens = meta.num_actual_tokens
        slots = meta.non_spec_state_indices_tensor[:tokens]
        mixed = self.convolved(mixed_qkv[:tokens], self.weight, layer.conv1d.bias, slots)
        kernels.delta_rule_step(
            mixed,
            a[:tokens],
            b[:tokens],
            layer.A_log,
            layer.dt_bias,
            states.pool_of(place.matrix_type),
            states.table,
            slots,
            place.first,
            layer.num_k_heads // layer.tp_size,
            place.tile,
            core_attn_out[:tokens],
        )
        return None


class StateSpaceCore(StateCore):
    """That of Mamba-2."""

    METHOD = "conv_ssm_forward"

    def __call__(self, projected_states: torch.Tensor, output: torch.Tensor) -> Any:
        meta = self.metadata()
        if meta is None:
            return self.stock(projected_states, output)
        if meta.num_prefills or not self.place.tile:
            of_decodes, of_prompts = meta.state_indices_tensor_d, meta.state_indices_tensor_p
            parts = [
                *([of_decodes[: meta.num_decodes, 0]] if of_decodes is not None else []),
                *([of_prompts[: meta.num_prefills]] if of_prompts is not None else []),
            ]
            return self.in_one_piece(torch.cat(parts), projected_states, output)
        if not meta.num_decodes:
            return None
        layer, place, states = self.layer, self.place, self.states
        tokens = meta.num_decode_tokens
        slots = meta.state_indices_tensor_d[:tokens, 0]
        behind_gate = projected_states[:tokens, layer.tped_intermediate_size :]
        inputs, steps = behind_gate.split((layer.tped_conv_size, layer.tped_dt_size), dim=-1)
        convolved = self.convolved(inputs, layer.conv_weights, layer.conv1d.bias, slots)
        heads, values, size = place.matrices
        given, into, out_of = layer.split_hidden_states_B_C_fn(convolved)
        kernels.state_space_step(
            given.view(tokens, heads, values),
            steps,
            layer.A,
            into.view(tokens, -1, size),
            out_of.view(tokens, -1, size),
            layer.D,
            layer.dt_bias,
            states.pool_of(place.matrix_type),
            states.table,
            slots,
            place.first,
            place.tile,
            output[:tokens].view(tokens, heads, values),
        )
        return None


def _renumbered(meta: GDNAttentionMetadata | Mamba2AttentionMetadata) -> Any:
    decodes, count = meta.num_decodes, meta.num_decodes + meta.num_prefills
    if isinstance(meta, GDNAttentionMetadata):
        slots = meta.non_spec_state_indices_tensor
        assert slots is not None
        numbers = torch.arange(1, count + 1, dtype=slots.dtype, device=slots.device)
        return replace(meta, non_spec_state_indices_tensor=numbers, prefill_state_indices=numbers[decodes:])
    of_decodes, of_prompts = meta.state_indices_tensor_d, meta.state_indices_tensor_p
    some = of_decodes if of_prompts is None else of_prompts
    assert some is not None
    numbers = torch.arange(1, count + 1, dtype=some.dtype, device=some.device)
    return replace(
        meta,
        state_indices_tensor_d=None if of_decodes is None else numbers[:decodes, None],
        state_indices_tensor_p=None if of_prompts is None else numbers[decodes:],
    )


def workspace_bytes(vllm_config: VllmConfig, specs: Mapping[str, MambaSpec], page_bytes: int) -> int:
    """Device memory that an engine takes for states beside the pool: the slots' pages, and the copies of the largest
    batch of prompts."""
    if not specs:
        return 0
    places, scheduling = places_of(specs, page_bytes), vllm_config.scheduler_config
    together = min(scheduling.max_num_seqs, STATE_PROMPTS)
    table = 4 * (scheduling.max_num_seqs + 1) * sum(place.pages for place in places.values())
    return table + COPIES * together * max(place.bytes for place in places.values())


def keep_own_kernels() -> None:
    """Have prompts of gated delta nets computed by vLLM's own kernels, unless told otherwise: where it takes others,
    these are compiled when they are first used, which takes the CUDA toolkit. To be called before the model is made.

    Raises:
        RuntimeError: vLLM's layers are not those that the steps here were written for.
    """
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    check_states()
    stock = qwen_gdn_linear_attn._resolve_gdn_prefill_backend

    def resolved(vllm_config: VllmConfig) -> Any:
        # vLLM reads it from a dict only, and ours is none (`vllm.args.EnginePlace`).
        asked = {"gdn_prefill_backend": vllm_config.additional_config.get("gdn_prefill_backend", "triton")}
        return stock(SimpleNamespace(additional_config=asked, model_config=vllm_config.model_config))

    qwen_gdn_linear_attn._resolve_gdn_prefill_backend = resolved


# KiB of shared memory that a block of threads can have, by compute capability (CUDA C++ Programming Guide, "Compute
# Capabilities"); the least of them of one that is not listed.
_SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_LEAST_SHARED_MEMORY = 99


def import_kernels() -> None:
    """Import vLLM's kernels of gated delta nets without initialising CUDA, so that who has imported them can fork.

    Their modules ask torch and Triton what GPU this is while they are imported, to choose sizes. They get the same
    answers from NVML, or, of shared memory, which NVML does not know, from a table."""
    from triton.runtime import driver

    name, capability = current_platform.get_device_name(), current_platform.get_device_capability()
    assert capability is not None, "there is a GPU"
    shared = _SHARED_MEMORY.get((capability.major, capability.minor), _LEAST_SHARED_MEMORY) << 10
    answers = {
        "get_device_name": lambda *_: name,
        "get_device_capability": lambda *_: (capability.major, capability.minor),
    }
    stock, active = {each: getattr(torch.cuda, each) for each in answers}, driver._active
    vars(torch.cuda).update(answers)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: SimpleNamespace(backend="cuda"),
            utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": shared}),
        )
    )
    try:
        import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn  # noqa: F401
    finally:
        vars(torch.cuda).update(stock)
        driver._active = active
