"""FlashAttention of the quickstart's heads as vLLM calls it, with and without metadata, whole and in splits.

    python -m tests.gpu.trial.flash FILE.json

Nothing of MuxServe is in the path: pages hold all heads of a block. Each case is compared with ordinary attention in
float32, which the host computes, and called several times on the same inputs: results that differ from each other are a
race.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from muxserve.gpu.sm import PERCENTAGE
from tests.gpu.test_attention import QUICKSTART
from tests.gpu.trial.runner import finding

BLOCK, TIMES = 16, 20
# Cases that the finding names.
MOST_NAMED = 6
# New tokens and tokens in the cache of each request. 24 prompts with 4 heads are 96 tiles: one wave on 132 SMs, two on
# 92, and the second one's come from a counter in the metadata.
BATCHES = {
    "one prompt": [(46, 0)],
    "prompts": [(46, 0), (111, 0), (19, 0), (84, 0)],
    "24 prompts": [(19 + 13 * number % 93, 0) for number in range(24)],
    "48 prompts": [(19 + 13 * number % 93, 0) for number in range(48)],
    "a hit in the prefix cache": [(14, 32), (46, 64), (19, 0)],
    "decode": [(1, 130), (1, 20), (1, 64), (1, 300)],
}
METADATA = {"none": None, "splits chosen": 0, "no splits": 1}


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cached: int) -> torch.Tensor:
    """Causal attention of one request in float32, [tokens, heads, dim]."""
    group = query.shape[1] // key.shape[1]
    q = query.float().transpose(0, 1)
    k, v = (each.float().repeat_interleave(group, 1).transpose(0, 1) for each in (key, value))
    rows, columns = torch.arange(q.shape[1], device=q.device)[:, None], torch.arange(k.shape[1], device=q.device)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=columns <= rows + cached).transpose(0, 1)


def case(heads: int, kv_heads: int, dim: int, batch: list[tuple[int, int]], splits: int | None, number: int) -> Any:
    """One case: the largest and the mean error, and how many of the further calls gave other results.

    Args:
        splits: for the metadata; None: without metadata.
        number: `num_splits` of the call.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    generator = torch.Generator().manual_seed(1)

    def some(tokens: int, count: int) -> torch.Tensor:
        return torch.randn((tokens, count, dim), generator=generator).bfloat16()

    lengths = [new + cached for new, cached in batch]
    columns = -(-max(lengths) // BLOCK)
    table = 1 + torch.randperm(len(batch) * columns, generator=generator).view(len(batch), columns)
    keys, values = torch.zeros((2, 1 + table.numel(), BLOCK, kv_heads, dim), dtype=torch.bfloat16)
    queries, expected = [], []
    for row, (new, cached) in enumerate(batch):
        query, key, value = some(new, heads), some(new + cached, kv_heads), some(new + cached, kv_heads)
        places = torch.arange(new + cached)
        pages, offsets = table[row, places // BLOCK], places % BLOCK
        keys[pages, offsets], values[pages, offsets] = key, value
        queries.append(query)
        expected.append(plain(query, key, value, cached))
    starts = torch.tensor([0, *itertools.accumulate(new for new, _ in batch)], dtype=torch.int32, device="cuda")
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    longest = max(new for new, _ in batch)
    metadata = None
    if splits is not None:
        metadata = get_scheduler_metadata(
            len(batch), longest, max(lengths), heads, kv_heads, dim, used, cu_seqlens_q=starts, page_size=BLOCK,
            causal=True, num_splits=splits,
        )  # fmt: skip

    q, k, v, block_table = (each.cuda() for each in (torch.cat(queries), keys, values, table.int()))

    def attend() -> torch.Tensor:
        return flash_attn_varlen_func(
            q=q, k=k, v=v, max_seqlen_q=longest, cu_seqlens_q=starts, seqused_k=used, max_seqlen_k=max(lengths),
            causal=True, block_table=block_table, scheduler_metadata=metadata, num_splits=number, fa_version=3,
        )  # fmt: skip

    first = attend()
    error = (first.cpu().float() - torch.cat(expected)).abs()
    return {
        "largest": float(error.max()),
        "mean": float(error.mean()),
        "other_results": sum(not torch.equal(attend(), first) for _ in range(TIMES)),
    }


def main() -> int:
    """Exit code 0: errors are results."""
    out = Path(sys.argv[1])
    report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rows = report.setdefault(f"{os.environ.get(PERCENTAGE, '100')} %, {sms} SMs", {})
    for (heads, kv_heads, dim), name, metadata in itertools.product(QUICKSTART, BATCHES, METADATA):
        splits = METADATA[metadata]
        for number in (0, 1) if splits is None else (splits,):
            key = f"{heads}-{kv_heads}-{dim}, {name}, metadata: {metadata}, num_splits {number}"
            try:
                rows[key] = case(heads, kv_heads, dim, BATCHES[name], splits, number)
            except RuntimeError as error:
                rows[key] = {"error": str(error)[:300]}
        out.write_text(json.dumps(report, indent=1))
    wrong = [key for key, row in rows.items() if not row.get("largest", float("inf")) < 2e-2 or row["other_results"]]
    first = "; ".join(wrong[:MOST_NAMED]) or "none"
    finding(f"FlashAttention on {sms} SMs: {len(wrong)} of {len(rows)} cases are wrong, of these first {first}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
