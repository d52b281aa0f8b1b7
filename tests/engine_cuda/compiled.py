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
