"""A token's step of states on pages, against what others compute with states in one piece."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

pytest.importorskip("vllm")

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from muxserve.engine.cuda import kernels
from muxserve.engine.cuda.states import StatePlace, places_of

REQUESTS, SLOTS, PAGE = 3, 5, 96


def paged(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool in which `whole` [R, numbers] lies on pages here and there, the pages of slots, and which slots."""
    per_slot = -(-whole.shape[1] // PAGE)
    numbers = torch.randperm(SLOTS * per_slot) + 1
    pages = numbers.view(SLOTS, per_slot).to(torch.int32)
    slots = torch.tensor([4, 1, 2], dtype=torch.int32)
    pool = torch.full((SLOTS * per_slot + 1, PAGE), torch.nan)
    padded = torch.nn.functional.pad(whole, (0, per_slot * PAGE - whole.shape[1]))
    pool[pages[slots.long()].long()] = padded.view(REQUESTS, per_slot, PAGE)
    return pool, pages, slots


def together(pool: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return pool[pages[slots.long()].long()].flatten(1)[:, : shape[1:].numel()].view(shape)


def test_a_gated_delta_net_steps_as_transformers_computes_it() -> None:
    torch.manual_seed(1)
    heads, key_heads, keys, values = 4, 2, 16, 12
    state = torch.randn(REQUESTS, heads, values, keys)
    mixed = torch.randn(REQUESTS, 2 * key_heads * keys + heads * values)
    decay, gate = torch.randn(REQUESTS, heads), torch.randn(REQUESTS, heads)
    log, bias = torch.randn(heads), torch.randn(heads)
    pool, pages, slots = paged(state.flatten(1))
    out = torch.empty(REQUESTS, heads, values)
    tile = kernels.tile_rows(PAGE, values, keys)
    assert tile == 2, "of six rows to a page and twelve to a head as many as a power of two has"
    kernels.delta_rule_step(mixed, decay, gate, log, bias, pool, pages, slots, 0, key_heads, tile, out)

    query, key, value = mixed.split((key_heads * keys, key_heads * keys, heads * values), dim=1)
    # Transformers has keys before values, and a dimension of tokens.
    of_keys = [each.view(REQUESTS, 1, key_heads, keys).repeat_interleave(2, dim=2) for each in (query, key)]
    expected, last = torch_recurrent_gated_delta_rule(
        *of_keys,
        value.view(REQUESTS, 1, heads, values),
        g=(-log.exp() * torch.nn.functional.softplus(decay + bias))[:, None],
        beta=gate.sigmoid()[:, None],
        initial_state=state.mT.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, expected[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together(pool, pages, slots, state.shape), last.mT, rtol=1e-4, atol=1e-5)


def test_the_states_of_layers_lie_one_behind_the_other_each_from_a_page_on() -> None:
    spec = MambaSpec(
        block_size=16,
        shapes=((3, 40), (2, 16, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    )
    places = places_of({"a": spec, "b": spec}, 512)
    assert [(place.first, place.pages) for place in places.values()] == [(0, 3), (3, 3)], "1,024 and 240 bytes"
    assert places["b"].first_input == (3 * 512 + 1024) // 2
    assert places["a"].tile == 16
    # Where a page ends within a row, steps are computed in one piece, as prompts are.
    assert StatePlace.of(spec, 0, 500).tile == 0
