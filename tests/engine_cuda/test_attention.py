"""Builder and attention of the CUDA engine, with FlashAttention replaced by plain torch that reads pages by stride."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from muxserve.engine.cuda import attention, tables
from muxserve.engine.cuda.attention import PooledFlashImpl, PooledFlashMetadataBuilder
from muxserve.probes.attention import settings
from tests.engine_cuda import paged_reference

BLOCK = 16
MAX_LEN = 160
MAX_SEQS = 8


class Unit:
    """A pool with a model in it, pages in random order, and the dense K and V that should be in them."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        layers: int,
        monkeypatch: pytest.MonkeyPatch,
        windows: tuple[int | None, ...] = (),
        softcap: float = 0.0,
        sinks: bool = False,
        **options: Any,
    ):
        self.windows, self.softcap = windows or (None,) * layers, softcap
        self.heads, self.kv_heads, self.dim, self.layers = heads, kv_heads, dim, layers
        self.generator = torch.Generator().manual_seed(heads * 100 + kv_heads)
        blocks = 1 + MAX_SEQS * MAX_LEN // BLOCK
        pages = blocks * layers * kv_heads
        order = torch.randperm(pages, generator=self.generator).to(torch.int32)
        self.page_table = order.view(blocks, layers, kv_heads).clone()
        self.page_table[0] = -1
        self.pool = torch.full((pages, 1, BLOCK, 2 * dim), float("nan"))
        self.free = (1 + torch.randperm(blocks - 1, generator=self.generator)).tolist()
        names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
        monkeypatch.setattr(flash_attn, "get_num_attention_heads_from_layers", lambda *_: heads)
        monkeypatch.setattr(flash_attn, "get_dcp_world_size_and_rank", lambda *_: (1, 0))
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=kv_heads, head_size=dim, dtype=torch.float32)
        config = settings(MAX_SEQS, MAX_LEN, **options)
        self.sinks = [torch.randn(heads, generator=self.generator) if sinks else None for _ in range(layers)]
        self.impls = [
            PooledFlashImpl(heads, dim, dim**-0.5, kv_heads, None, window, "auto", logits_soft_cap=softcap, sinks=sink)
            for window, sink in zip(self.windows, self.sinks, strict=True)
        ]
        built = {impl.sliding_window for impl in self.impls}
        monkeypatch.setattr(flash_attn, "_get_sliding_window_configs", lambda *_: set(built))
        self.builder = PooledFlashMetadataBuilder(spec, names, config, torch.device("cpu"))
        self.builder.bind(self.page_table, names)
        self.builders: dict[str, PooledFlashMetadataBuilder] = {}  # of layers whose builder is another one
        self.layer_names = names
        self.block_ids: list[list[int]] = []
        self.context: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # [request][layer] dense K and V

    def add_request(self) -> int:
        self.block_ids.append([])
        empty = torch.empty((0, self.kv_heads, self.dim))
        self.context.append([(empty, empty) for _ in range(self.layers)])
        return len(self.block_ids) - 1

    def common(self, batch: list[tuple[int, int]], padded: int = 0) -> CommonAttentionMetadata:
        """vLLM's description of a batch of (request, new tokens), `padded` empty requests of one token after it."""
        counts = torch.tensor([tokens for _, tokens in batch] + [0] * padded)
        starts = torch.zeros(len(batch) + padded + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        lens, slots = [], []
        table = torch.zeros((len(batch) + padded, MAX_LEN // BLOCK), dtype=torch.int32)
        for row, (request, tokens) in enumerate(batch):
            have = self.context[request][0][0].shape[0]
            ids = self.block_ids[request]
            while len(ids) * BLOCK < have + tokens:
                ids.append(self.free.pop())
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            table[row, len(ids) :] = 7777777  # stale: must not be read
            slots += [ids[p // BLOCK] * BLOCK + p % BLOCK for p in range(have, have + tokens)]
            lens.append(have + tokens)
        total = len(slots) + padded
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens + [0] * padded, dtype=torch.int32),
            num_reqs=len(batch) + padded,
            num_actual_tokens=total,
            max_query_len=int(counts.max()),
            max_seq_len=max(lens),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padded, dtype=torch.int64),
        )

    def step(self, batch: list[tuple[int, int]], padded: int = 0) -> Any:
        """Run one batch through every layer and compare with ordinary attention; returns the metadata."""
        common = self.common(batch, padded)
        metadata = self.builder.build(0, common)
        others = {id(each): each.build(0, common) for each in self.builders.values()}
        tokens = sum(count for _, count in batch)
        for index, name in enumerate(self.layer_names):
            # As it comes from one projection: q, k and v side by side, none of them contiguous.
            width = (self.heads + 2 * self.kv_heads) * self.dim
            projected = torch.randn((tokens + padded + 3, width), generator=self.generator)
            sizes = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
            query, key, value = (
                part.view(tokens + padded + 3, -1, self.dim) for part in projected.split(sizes, dim=-1)
            )
            output = torch.full((tokens + padded + 3, self.heads, self.dim), 5.0)
            layer = SimpleNamespace(layer_name=name)
            built = others[id(self.builders[name])] if self.builders else metadata
            self.impls[index].forward(layer, query, key, value, self.pool, built, output)
            expected, row = [], 0
            for request, count in batch:
                k, v = self.context[request][index]
                k = torch.cat([k, key[row : row + count]])
                v = torch.cat([v, value[row : row + count]])
                self.context[request][index] = (k, v)
                expected.append(self._attention(query[row : row + count], k, v, index))
                row += count
            torch.testing.assert_close(output[:tokens], torch.cat(expected), rtol=2e-4, atol=2e-5)
            assert bool((output[tokens + padded :] == 5.0).all()), "wrote beyond the batch"
        return metadata

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """Ordinary causal attention of one request in one layer, by torch."""
        window, sinks = self.windows[layer], self.sinks[layer]
        group = self.heads // self.kv_heads
        q = query.transpose(0, 1)
        k, v = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (key, value))
        new, total = query.shape[0], key.shape[0]
        age = torch.arange(new)[:, None] + total - new - torch.arange(total)[None]
        scores = q @ k.transpose(1, 2) * self.dim**-0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        hidden = (age < 0) | (age >= (window or total))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is None:
            return (scores.softmax(-1) @ v).transpose(0, 1)
        nothing = sinks[:, None, None].expand(-1, new, 1)
        return (torch.cat([scores, nothing], -1).softmax(-1)[..., :-1] @ v).transpose(0, 1)

    def pages_untouched(self) -> bool:
        """Whether only pages of blocks that requests hold were written."""
        held = torch.tensor(sorted({b for ids in self.block_ids for b in ids}))
        mine = torch.zeros(self.pool.shape[0], dtype=torch.bool)
        mine[self.page_table[held].flatten().long()] = True
        return bool(self.pool[~mine].isnan().all())


SHAPES = [pytest.param(4, 4, 32, id="MHA"), pytest.param(8, 2, 16, id="GQA"), pytest.param(6, 1, 24, id="MQA")]


@pytest.fixture(params=["together", "by-layer"])
def gathering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of all layers at once, or of one layer at a time."""
    if request.param == "by-layer":
        monkeypatch.setattr(tables, "MAX_BYTES", 0)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.usefixtures("reference_flash", "gathering")
def test_prefill_chunks_mixed_batches_and_decode(
    heads: int, kv_heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = Unit(heads, kv_heads, dim, 3, monkeypatch)
    a, b, c, d = (unit.add_request() for _ in range(4))
    assert not unit.step([(a, 37)]).decode_only  # one prompt
    unit.step([(b, 16), (c, 50)])  # a full block; a first chunk
    unit.step([(a, 1), (c, 40), (b, 1), (d, 2)])  # decodes, a later chunk and a new prompt together
    assert unit.step([(d, 1), (a, 1), (c, 1), (b, 1)]).decode_only
    for _ in range(BLOCK + 1):  # across a block border
        unit.step([(a, 1), (b, 1), (d, 1)])
    unit.step([(c, 1)])
    assert unit.pages_untouched()


@pytest.mark.parametrize("windows", [(20, 20, 20), (20, None, 33)])
@pytest.mark.usefixtures("reference_flash")
def test_layers_see_their_windows(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    asked: list[dict[str, Any]] = []

    def metadata(**kwargs: Any) -> torch.Tensor:
        asked.append(kwargs)
        return paged_reference.get_scheduler_metadata(**kwargs)

    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", metadata, raising=False)
    unit = Unit(8, 2, 16, 3, monkeypatch, windows=windows, softcap=0.5)
    a, b = unit.add_request(), unit.add_request()
    unit.step([(a, 70), (b, 5)])
    unit.step([(a, 1), (b, 40)])
    for _ in range(3):
        unit.step([(a, 1), (b, 1)])
    # The kernel's work is planned for a window only where all layers have the same.
    assert [kwargs["window_size"] for kwargs in asked] == ([(19, 0)] * 5 if len(set(windows)) == 1 else [])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.usefixtures("reference_flash")
def test_what_goes_to_sinks_is_missing_from_the_output(
    heads: int, kv_heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a layer are those of its query heads, in every kind of batch; version 2 of FlashAttention has none."""
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: False, raising=False)
    unit = Unit(heads, kv_heads, dim, 2, monkeypatch, windows=(20, None), sinks=True)
    a, b = unit.add_request(), unit.add_request()
    unit.step([(a, 37), (b, 9)])
    unit.step([(a, 1), (b, 20)])
    for _ in range(2):
        assert unit.step([(b, 1), (a, 1)], padded=1).decode_only


@pytest.mark.usefixtures("reference_flash", "gathering")
def test_layers_with_other_query_heads_keep_their_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes a builder per number of query heads; each sees only its layers, which are some of the page table's."""
    unit = Unit(8, 2, 16, 4, monkeypatch)
    names = unit.layer_names
    whole = unit.builder
    wide, few = (
        PooledFlashMetadataBuilder(whole.kv_cache_spec, names[first::2], whole.vllm_config, whole.device)
        for first in (0, 1)
    )
    tables = wide.bind(unit.page_table, names)
    assert few.bind(unit.page_table, names, tables) is tables
    a, b = unit.add_request(), unit.add_request()
    unit.builders = {name: (wide, few)[index % 2] for index, name in enumerate(names)}
    unit.step([(a, 37), (b, 20)])
    for _ in range(3):
        unit.step([(a, 1), (b, 1)])
    assert unit.pages_untouched()


@pytest.mark.usefixtures("reference_flash")
def test_a_padded_decode_batch_computes_and_writes_nothing_for_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit(8, 2, 16, 2, monkeypatch, full_graphs=True)
    requests = [unit.add_request() for _ in range(5)]
    unit.step([(r, 5 + r) for r in requests])
    metadata = unit.step([(r, 1) for r in requests], padded=3)
    assert metadata.query_start_loc.tolist() == [*range(10), *[10] * 7]
    assert metadata.seq_lens[10:].tolist() == [0] * 6
    assert unit.pages_untouched()


@pytest.mark.usefixtures("reference_flash", "gathering")
def test_what_a_full_graph_reads_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed graph reads the addresses of its capture; the next build must have put its batch there."""
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", paged_reference.get_scheduler_metadata, raising=False)
    unit = Unit(8, 2, 16, 2, monkeypatch, full_graphs=True)
    assert (
        PooledFlashMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )  # type: ignore[arg-type]
    requests = [unit.add_request() for _ in range(4)]
    unit.step([(r, 9) for r in requests])

    def addresses(metadata: Any) -> list[int]:
        read = [metadata.query_start_loc, metadata.seq_lens, metadata.scheduler_metadata, metadata.page_table]
        return [t.data_ptr() for t in [*read, *(metadata.tables.layer(i) for i in range(unit.layers))]]

    captured = unit.builder.build_for_cudagraph_capture(unit.common([(r, 1) for r in requests]))
    replayed = unit.step([(r, 1) for r in reversed(requests)])
    assert addresses(captured) == addresses(replayed)
    assert captured.max_num_splits == replayed.max_num_splits
    assert captured.scheduler_metadata.shape == replayed.scheduler_metadata.shape
    assert captured.query_start_loc.tolist() == replayed.query_start_loc.tolist()
    assert captured.seq_lens.tolist() == replayed.seq_lens.tolist()


@pytest.mark.usefixtures("reference_flash")
def test_the_scheduler_of_flash_attention_is_told_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    asked: list[dict[str, Any]] = []

    def metadata(**kwargs: Any) -> torch.Tensor:
        asked.append(kwargs)
        return paged_reference.get_scheduler_metadata(**kwargs)

    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", metadata, raising=False)
    unit = Unit(12, 3, 16, 1, monkeypatch)
    requests = [unit.add_request() for _ in range(3)]
    unit.step([(r, 20) for r in requests])
    unit.step([(r, 1) for r in requests])
    for kwargs in asked:
        assert (kwargs["batch_size"], kwargs["num_heads_q"], kwargs["num_heads_kv"]) == (9, 4, 1)
        assert kwargs["page_size"] == BLOCK
    assert asked[0]["cache_seqlens"].tolist() == [21] * 9  # the buffer now holds the later batch
    assert asked[1]["cu_seqlens_q"].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alibi_slopes": [0.1] * 4}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"kv_sharing_target_layer_name": "other"}, "share another's KV cache"),
    ],
)
def test_what_the_pool_cannot_carry_is_refused_in_words(options: dict[str, Any], words: str) -> None:
    arguments = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **options}
    with pytest.raises(NotImplementedError, match=words):
        PooledFlashImpl(4, 16, 0.25, 4, **arguments)


def test_vllm_finds_the_backend_under_its_name() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    attention.register()
    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert backend is attention.PooledFlashBackend
    assert backend.get_name() == "CUSTOM"
    assert torch.float32 not in backend.supported_dtypes
