"""Compile the Triton kernels for GPUs without one, down to machine code: `python compiled.py`."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from muxserve.engine.cuda import triton_kernels as source
from muxserve.probes.sms import mark_sm_kernel

I32, I64, KV = "*i32", "*i64", "*bf16"

KERNELS = [
    (
        source.fold_requests_kernel,
        {"query_start_ptr": I32, "seq_lens_ptr": I32, "starts_ptr": I32, "lens_ptr": I32, "requests": "i32"},
        [{"HEADS": heads, "HEAD_MAJOR": major, "BLOCK": 256} for heads in (1, 8) for major in (False, True)],
    ),
    (
        source.gather_tables_kernel,
        {
            "page_table_ptr": I32,
            "block_table_ptr": I32,
            "seq_lens_ptr": I32,
            "out_ptr": I32,
            "requests": "i32",
            "table_stride": "i32",
            "first_layer": "i32",
            "layer_stride": "i32",
            "row_stride": "i32",
            "columns": "i32",
        },
        [
            {
                "LAYERS": layers,
                "WIDTH": 32 * 8,
                "HEADS": 8,
                "BLOCK_TOKENS": 32,
                "HEAD_MAJOR": major,
                "BLOCK_COLUMNS": 32,
                "BLOCK_WIDTH": width,
            }
            for layers, width in ((32, 64), (1, 8))
            for major in (False, True)
        ],
    ),
    (
        source.store_kv_kernel,
        {
            "key_ptr": KV,
            "value_ptr": KV,
            "pool_ptr": KV,
            "page_table_ptr": I32,
            "slots_ptr": I64,
            "key_token_stride": "i32",
            "key_head_stride": "i32",
            "value_token_stride": "i32",
            "value_head_stride": "i32",
            "layer": "i32",
        },
        [
            {
                "WIDTH": 32 * heads,
                "HEADS": heads,
                "HEAD_DIM": dim,
                "BLOCK_TOKENS": 4096 // dim,
                "PADDED_HEADS": padded,
                "PADDED_DIM": padded_dim,
            }
            for heads, padded, dim, padded_dim in ((8, 8, 128, 128), (3, 4, 64, 64), (1, 1, 80, 128))
        ],
    ),
    (
        source.apply_sinks_kernel,
        {
            "output_ptr": KV,
            "lse_ptr": "*fp32",
            "sinks_ptr": KV,
            "tokens": "i32",
            "output_row_stride": "i32",
            "lse_head_stride": "i32",
            "lse_row_stride": "i32",
        },
        [
            {
                "HEADS": 8,
                "GROUP": group,
                "HEAD_DIM": 64,
                "HEAD_MAJOR": major,
                "PADDED_GROUP": 8,
                "PADDED_DIM": 64,
            }
            for group in (8, 5)
            for major in (False, True)
        ],
    ),
    (
        source.scatter_rows_kernel,
        {"staging_ptr": I32, "table_ptr": I32},
        [{"WIDTH": 256, "BLOCK": 512}],
    ),
    (
        source.copy_states_kernel,
        {
            "pool_ptr": I32,
            "pages_ptr": I32,
            "slots_ptr": I32,
            "states_ptr": I32,
            "slot_stride": "i32",
            "first": "i32",
            "words": "i32",
        },
        [{"PAGES": 4000, "PAGE_WORDS": 4096, "TO_POOL": to_pool, "BLOCK": 1024} for to_pool in (False, True)],
    ),
    (
        source.convolve_step_kernel,
        {
            **dict.fromkeys(("inputs_ptr", "weight_ptr", "bias_ptr", "pool_ptr", "out_ptr"), KV),
            **dict.fromkeys(("pages_ptr", "slots_ptr"), I32),
            **dict.fromkeys(("input_stride", "slot_stride", "first"), "i32"),
        },
        [
            {
                "PAGES": 4000,
                "PAGE_NUMBERS": 8192,
                "CHANNELS": 8192,
                "WIDTH": 4,
                "TAP_STRIDE": tap,
                "CHANNEL_STRIDE": channel,
                "HAS_BIAS": biased,
                "BLOCK": 256,
            }
            for tap, channel, biased in ((8192, 1, False), (1, 3, True))
        ],
    ),
    (
        source.delta_rule_step_kernel,
        {
            **dict.fromkeys(("mixed_ptr", "decay_ptr", "gate_ptr", "decay_bias_ptr", "out_ptr"), KV),
            **dict.fromkeys(("decay_log_ptr", "pool_ptr"), "*fp32"),
            **dict.fromkeys(("pages_ptr", "slots_ptr"), I32),
            **dict.fromkeys(("mixed_stride", "slot_stride", "first_page"), "i32"),
            "scale": "fp32",
        },
        [
            {
                "PAGES": 4000,
                "PAGE_NUMBERS": 128 * rows,
                "KEY_HEADS": 16,
                "HEADS": 32,
                "KEYS": 128,
                "VALUES": 128,
                "TILE": min(rows, 32),
                "PADDED_KEYS": 128,
            }
            for rows in (16, 512)
        ],
    ),
    (
        source.state_space_step_kernel,
        {
            **dict.fromkeys(("inputs_ptr", "steps_ptr", "into_ptr", "out_of_ptr", "skip_ptr", "step_bias_ptr"), KV),
            "out_ptr": KV,
            **dict.fromkeys(("decay_ptr", "pool_ptr"), "*fp32"),
            **dict.fromkeys(("pages_ptr", "slots_ptr"), I32),
            **dict.fromkeys(("input_stride", "step_stride", "into_stride", "out_of_stride"), "i32"),
            **dict.fromkeys(("slot_stride", "first_page"), "i32"),
        },
        [
            {
                "PAGES": 4000,
                "PAGE_NUMBERS": size * rows,
                "GROUPS": 1,
                "HEADS": 48,
                "SIZE": size,
                "VALUES": 64,
                "TILE": rows,
                "PADDED_SIZE": 128,
            }
            for size, rows in ((128, 16), (80, 8))
        ],
    ),
    (mark_sm_kernel, {"seen_ptr": I32, "rounds": "i32"}, [{}]),
]


def main() -> None:
    for capability in (80, 90):
        for kernel, types, variants in KERNELS:
            for constants in variants:
                signature = {**types, **dict.fromkeys(constants, "constexpr")}
                keys = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
                compiled = triton.compile(
                    ASTSource(fn=kernel, signature=signature, constexprs=keys),
                    target=GPUTarget("cuda", capability, 32),
                )
                assert f".target sm_{capability}" in compiled.asm["ptx"]
                assert len(compiled.asm["cubin"]) > 0
                size = len(compiled.asm["cubin"])
                print(f"sm_{capability} {kernel.__name__} {constants}: {size} bytes")


if __name__ == "__main__":
    main()
