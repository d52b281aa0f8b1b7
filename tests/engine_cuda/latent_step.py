"""One decode step of the CUDA engine's latent attention over pages, and what plain attention makes of the same
numbers."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from muxserve.probes.attention import DEVICE

RANK, ROPE = 512, 64


def decoded_from_latents(
    lengths: Sequence[int], heads: int, layers: int, block: int, dtype: torch.dtype, device: str = DEVICE
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decode step with latent attention over pages in random order, one request for each length: what the CUDA engine
    computes and plain attention, [layers, requests, heads, rank] each."""
    from muxserve.engine.cuda.latent import PooledLatentImpl
    from muxserve.engine.cuda.tables import FoldedTables, TableShape

    on = torch.device(device)
    generator = torch.Generator().manual_seed(1)
    requests, longest = len(lengths), max(lengths)
    columns = -(-longest // block)
    ids = 1 + torch.arange(requests * columns, dtype=torch.int32).view(requests, columns)
    pages = (1 + ids.numel()) * layers
    table = torch.randperm(pages, generator=generator).to(torch.int32).view(-1, layers, 1).to(on)
    tables = FoldedTables(TableShape(layers, requests, columns), block, on)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=on)
    tables.begin(table, ids.to(on), seq_lens, requests, longest, head_major=False)
    pool = torch.zeros((pages, block, RANK + ROPE), dtype=dtype, device=on)
    places = [(r, p) for r, length in enumerate(lengths) for p in range(length)]
    slots = torch.tensor([int(ids[r, p // block]) * block + p % block for r, p in places], device=on)
    whole = SimpleNamespace(_k_scale=torch.ones((), device=on))
    found = []
    for layer in range(layers):
        impl = PooledLatentImpl.__new__(PooledLatentImpl)
        multiprocessors = torch.cuda.get_device_properties(on).multi_processor_count if on.type == "cuda" else 1
        values = {"kv_lora_rank": RANK, "scale": (RANK + ROPE) ** -0.5, "_sm_count": multiprocessors}
        for name, value in {**values, "page_table": table, "layer_index": layer, "dcp_world_size": 1}.items():
            setattr(impl, name, value)

        def some(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(on)

        latents, query = some(len(places), RANK + ROPE), some(requests, heads, RANK + ROPE)
        impl.do_kv_cache_update(latents[:, :RANK], latents[:, None, RANK:], pool, slots, "auto", whole._k_scale)
        meta: Any = SimpleNamespace(
            decode=SimpleNamespace(block_table=None, seq_lens=seq_lens),
            num_decodes=requests,
            max_seq_len=longest,
            causal=True,
            tables=tables,
        )
        output, _ = impl.forward_mqa(query, pool, meta, whole)
        rows = torch.split(latents.float(), list(lengths))
        scores = [(q.float() @ each.T * impl.scale).softmax(-1) for q, each in zip(query, rows, strict=True)]
        plain = torch.stack([s @ each[:, :RANK] for s, each in zip(scores, rows, strict=True)])
        found.append((output, plain))
    outputs, expected = zip(*found, strict=True)
    return torch.stack(outputs), torch.stack(expected)
