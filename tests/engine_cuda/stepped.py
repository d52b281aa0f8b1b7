"""A decode step of layers with states on pages, and vLLM's kernels for it on states in one piece; `python stepped.py`
prints how far they are apart, with TRITON_INTERPRET=1 without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
from vllm.third_party.flash_linear_attention.ops.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from muxserve.engine.cuda.states import PagedStates, StateCore

HEADS, GROUPS, VALUES, KEYS, WIDTH = 4, 2, 32, 64, 4
SEQUENCES = 5
# Sixteen rows: half of a head's state.
PAGE = 16 * KEYS * 4
SLOTS = [3, 0, 5, 1]

Parts = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Stepped:
    """A layer of made up numbers, its states on pages and in one piece."""

    def __init__(self, kind: MambaAttentionBackendEnum, method: str, channels: int, device: torch.device) -> None:
        self.generator, self.device, self.channels = torch.Generator().manual_seed(1), device, channels
        inputs, matrices = (WIDTH - 1, channels), (HEADS, VALUES, KEYS)
        spec = MambaSpec(
            block_size=16, shapes=(inputs, matrices), dtypes=(torch.bfloat16, torch.float32), mamba_type=kind
        )
        self.layer: Any = SimpleNamespace(prefix="l", mamba_type=kind, tp_size=1, num_k_heads=GROUPS)
        self.weight = self.some(channels, WIDTH)
        states = PagedStates({"l": spec}, SEQUENCES, PAGE, device)
        place = states.places["l"]
        assert place.tile == 16
        # Pages of the pool in no order.
        pages = 1 + torch.randperm((SEQUENCES + 1) * place.pages, generator=self.generator).view(-1, place.pages)
        states.place({slot: pages[slot].numpy() for slot in range(1, SEQUENCES + 1)})
        pool = torch.zeros((1 + pages.numel(), PAGE), dtype=torch.uint8, device=device)
        states.bind(pool, {"l": self.layer})
        self.core: StateCore = getattr(self.layer, method)
        self.inputs = self.some(SEQUENCES + 1, *inputs)
        self.matrices = self.some(SEQUENCES + 1, *matrices, dtype=torch.float32)
        self._copy(self.inputs, self.matrices, to_pool=True)
        self.slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)

    def some(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Numbers around 0."""
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def _copy(self, inputs: torch.Tensor, matrices: torch.Tensor, to_pool: bool) -> None:
        every = torch.arange(1, SEQUENCES + 1, dtype=torch.int32, device=self.device)
        self.core._copy(((matrices, 0), (inputs, self.core.place.matrix_bytes)), every, to_pool)

    def told(self, **meta: object) -> None:
        """What the step's metadata says."""
        every = {"num_prefills": 0, "num_decodes": len(SLOTS), **meta}
        self.core.metadata = lambda: SimpleNamespace(**every)  # type: ignore[method-assign]

    def convolved(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """By vLLM's kernel, or in plain torch where it is not interpreted."""
        if self.device.type == "cpu":
            window = torch.cat((self.inputs[self.slots], inputs[:, None]), dim=1)
            real = self.slots > 0
            self.inputs[self.slots[real]] = window[real, 1:]
            summed = (window.float() * self.weight.T.float()).sum(dim=1) + (0.0 if bias is None else bias.float())
            return torch.nn.functional.silu(summed).to(inputs.dtype)
        conv = self.inputs.transpose(-1, -2)
        found: torch.Tensor = causal_conv1d_update(
            inputs.clone(), conv, self.weight, bias, "silu", conv_state_indices=self.slots
        )
        return found

    def compared(self, ours: torch.Tensor, theirs: torch.Tensor) -> Parts:
        """What came out, of sequences that are real, and what is kept of each."""
        real = self.slots > 0
        inputs, matrices = torch.zeros_like(self.inputs), torch.zeros_like(self.matrices)
        self._copy(inputs, matrices, to_pool=False)
        kept = {"inputs": (inputs[1:], self.inputs[1:]), "matrices": (matrices[1:], self.matrices[1:])}
        return {"out": (ours[real], theirs[real]), **kept}


def delta_net(device: torch.device) -> Parts:
    """One step of a gated delta net."""
    channels = 2 * GROUPS * KEYS + HEADS * VALUES
    of = Stepped(MambaAttentionBackendEnum.GDN_ATTN, "_forward_core", channels, device)
    layer, requests = of.layer, len(SLOTS)
    layer.conv1d = SimpleNamespace(weight=of.weight[:, None], bias=None)
    layer.A_log, layer.dt_bias = of.some(HEADS, dtype=torch.float32), of.some(HEADS)
    mixed, gate, decay = of.some(requests, channels), of.some(requests, HEADS), of.some(requests, HEADS)
    of.told(num_actual_tokens=requests, non_spec_state_indices_tensor=of.slots)
    ours = torch.full((requests, HEADS, VALUES), 7.0, dtype=torch.bfloat16, device=device)
    layer._forward_core(mixed_qkv=mixed, b=gate, a=decay, core_attn_out=ours)

    theirs = torch.zeros_like(ours)
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=of.convolved(mixed, None),
        a=decay,
        b=gate,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        scale=KEYS**-0.5,
        initial_state=of.matrices,
        out=theirs.unsqueeze(1),
        ssm_state_indices=of.slots,
        use_qk_l2norm_in_kernel=True,
    )
    return of.compared(ours, theirs)


def state_space(device: torch.device) -> Parts:
    """One step of Mamba-2."""
    inner, side = HEADS * VALUES, GROUPS * KEYS
    of = Stepped(MambaAttentionBackendEnum.MAMBA2, "conv_ssm_forward", inner + 2 * side, device)
    layer, requests, channels = of.layer, len(SLOTS), of.channels
    layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size = inner, channels, HEADS
    layer.conv_weights, layer.conv1d = of.weight, SimpleNamespace(bias=of.some(channels))
    layer.split_hidden_states_B_C_fn = lambda each: each.split([inner, side, side], dim=-1)
    layer.A, layer.D, layer.dt_bias = -of.some(HEADS, dtype=torch.float32).abs(), of.some(HEADS), of.some(HEADS)
    projected = of.some(requests, inner + channels + HEADS)
    of.told(num_decode_tokens=requests, state_indices_tensor_d=of.slots[:, None])
    ours = torch.full((requests, inner), 7.0, dtype=torch.bfloat16, device=device)
    layer.conv_ssm_forward(projected_states=projected, output=ours)

    given, into, out_of = layer.split_hidden_states_B_C_fn(
        of.convolved(projected[:, inner : inner + channels], layer.conv1d.bias)
    )
    theirs = torch.zeros_like(ours).view(requests, HEADS, VALUES)
    selective_state_update(
        of.matrices,
        given.reshape(requests, HEADS, VALUES),
        projected[:, inner + channels :, None].expand(-1, -1, VALUES),
        layer.A[:, None, None].expand(-1, VALUES, KEYS),
        into.reshape(requests, GROUPS, KEYS),
        out_of.reshape(requests, GROUPS, KEYS),
        layer.D[:, None].expand(-1, VALUES),
        layer.dt_bias[:, None].expand(-1, VALUES),
        dt_softplus=True,
        state_batch_indices=of.slots[:, None],
        dst_state_batch_indices=of.slots[:, None],
        out=theirs,
    )
    return of.compared(ours.view_as(theirs), theirs)


def interpret() -> None:
    """Let Triton's interpreter run vLLM's kernels, which have some of Triton's functions by other names."""
    global tl
    import triton
    import triton.language as tl
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    @triton.jit
    def exp(x):
        return tl.exp(x)

    fused_recurrent.exp = exp


LAYERS = {"delta net": delta_net, "state space": state_space}


def main() -> None:
    interpret()
    for name, stepped in LAYERS.items():
        for part, (ours, theirs) in stepped(torch.device("cpu")).items():
            apart = (ours.float() - theirs.float()).abs().max()
            print(f"{name}, {part}: {float(apart / theirs.float().abs().max()):.6f}")


if __name__ == "__main__":
    main()
