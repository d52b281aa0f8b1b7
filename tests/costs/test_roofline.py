"""The roofline: against arithmetic by hand, and what must hold whatever the constants are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.costs.calibration import GPU, LINKS, Launches
from muxserve.costs.devices import device
from muxserve.costs.latency import CostError, EngineShape, Load, target_load
from muxserve.costs.roofline import Roofline, RooflineCosts
from muxserve.costs.work import layer_work
from tests.costs.models import MIXTRAL, SEVEN_B, llama

NVLINK = LINKS[device("A100").link]
# A device that reaches its peaks, and nothing else: what is left can be computed by hand.
IDEAL = replace(
    GPU,
    compute_efficiency=1.0,
    bandwidth_efficiency=1.0,
    kv_efficiency=1.0,
    attention_efficiency=1.0,
    compute_shape=1.0,
    bandwidth_shape=1.0,
    layer_seconds=0.0,
    host_step=0.0,
    host_sequence=0.0,
    launches={},
)


def costs(model: object = SEVEN_B, by: object = None, **shape: object) -> RooflineCosts:
    where = EngineShape(**{"device": "A100", "dtype": "float16", **shape})  # type: ignore[arg-type]
    return Roofline(by).engine(model, where)  # type: ignore[arg-type]


def test_large_prefill_is_bound_by_operations() -> None:
    tokens = 8192
    linear = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008)) * tokens / 312e12
    attention = 4 * 32 * 4096 * (tokens * (tokens + 1) // 2) / 312e12
    seconds = costs(by=replace(IDEAL, overlap=60.0)).prefill(tokens, tokens * (tokens + 1) // 2, 1)
    head = 2 * 32000 * 4096 / 2039e9  # one row: its weights are read for it
    assert seconds == pytest.approx(linear + attention + head, rel=0.02)


def test_small_decode_is_bound_by_the_bytes_of_weights_and_kv() -> None:
    weights = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096)
    kv = 2 * 32 * 4096 * 2
    found = costs(by=replace(IDEAL, overlap=60.0)).decode(1, 1000)
    assert found.fixed == pytest.approx(weights / 2039e9, rel=0.01)
    assert found.per_token == pytest.approx(kv / 2039e9)


def test_a_window_bounds_what_its_layers_compute_and_read() -> None:
    full, windowed = costs(by=IDEAL), costs(replace(SEVEN_B, window=1000, windowed_layers=24), by=IDEAL)
    slope = full.decode(4, 0).per_token
    assert windowed.decode(4, 4000) == full.decode(4, 4000)._replace(until=4000.0)
    # Beyond it the context of a quarter of the layers grows.
    assert windowed.decode(4, 4001).per_token == pytest.approx(slope / 4)
    for context in (100, 4000, 20_000):
        read = min(context, 4000) * 0.75 + context * 0.25
        seconds = full.decode(4, 0).fixed + read * slope
        assert windowed.decode(4, context).seconds(context) == pytest.approx(seconds)
        assert windowed.decode_load(4, context).bandwidth <= full.decode_load(4, context).bandwidth + 1e-9
    tokens = 8192
    pairs = tokens * (tokens + 1) // 2
    saved = 0.75 * (pairs - tokens * 1000) * full.work.flops_per_pair / 312e12
    assert windowed.prefill(tokens, pairs, 1) == pytest.approx(full.prefill(tokens, pairs, 1) - saved)
    assert windowed.prefill(500, 500 * 501 // 2, 1) == full.prefill(500, 500 * 501 // 2, 1)
    everywhere = costs(replace(SEVEN_B, window=1000, windowed_layers=32), by=IDEAL)
    assert everywhere.decode(4, 90_000).seconds(90_000) == pytest.approx(full.decode(4, 4000).seconds(4000))


@given(
    batch=st.integers(1, 64),
    context=st.integers(0, 50_000),
    window=st.integers(1, 8000),
    windowed=st.integers(0, 32),
    floor=st.floats(0.0, 0.05),
)
def test_decode_s_pieces_are_the_slower_of_launching_and_reading(
    batch: int, context: int, window: int, windowed: int, floor: float
) -> None:
    made = costs(replace(SEVEN_B, window=window, windowed_layers=windowed), by=IDEAL)
    made.host = replace(made.host, decode_launches=floor)
    found = made.decode(batch, context)
    assert context <= found.until
    reading = made.work.seen_context(batch, context) * made._kv_second
    assert found.seconds(context) == pytest.approx(max(floor, made.linear(batch, batch) + reading))


def test_tensor_parallelism_splits_the_work_and_adds_all_reduces() -> None:
    one, four = costs(by=IDEAL), costs(by=IDEAL, tp=4)
    tokens = 4096
    exchanged = 2 * 32 * (2 * 3 / 4 * tokens * 4096 * 2) / (300e9 * NVLINK.efficiency) + 2 * 32 * 2 * NVLINK.latency
    split = one.prefill(tokens, 0, 1) / 4 + exchanged
    # Every device still reads and writes the whole residual stream.
    assert split < four.prefill(tokens, 0, 1) < 1.1 * split


def test_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(CostError, match="32 attention heads cannot be split over 3"):
        costs(tp=3)


def test_few_kv_heads_are_copied_to_each_device() -> None:
    grouped = llama(kv_heads=2)
    assert layer_work(grouped, 8, "float16").kv_bytes_per_token == layer_work(grouped, 2, "float16").kv_bytes_per_token


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_shares_outside_the_device_are_refused(share: float) -> None:
    with pytest.raises(CostError, match="share"):
        costs(share=share)


def test_a_share_costs_compute_more_than_bandwidth() -> None:
    half, whole = costs(share=0.5), costs()
    prefill = half.prefill(4096, 0, 1) / whole.prefill(4096, 0, 1)
    decode = half.decode(1, 4096).seconds(4096) / whole.decode(1, 4096).seconds(4096)
    assert 1.0 < decode < 1.3 < prefill < 2.1


def test_a_mixture_reads_only_the_experts_that_are_used() -> None:
    work = layer_work(MIXTRAL, 1, "float16")
    one_token, many = work.weight_bytes(1), work.weight_bytes(1000)
    assert one_token == pytest.approx(work.dense_bytes + work.expert_bytes / 4)
    assert many == pytest.approx(work.dense_bytes + work.expert_bytes)
    dense = layer_work(llama(kv_heads=8, intermediate=2 * 14336), 1, "float16")
    assert work.flops_per_token == pytest.approx(dense.flops_per_token)


def test_launches_are_a_floor_and_decode_rises_after_it() -> None:
    found = costs(by=replace(IDEAL, launches={"piecewise": Launches(decode=1e-3)}))
    flat = found.decode(1, 10)
    assert flat.seconds(10) == pytest.approx(32e-3)
    rising = found.decode(1, int(flat.until) + 1)
    assert flat.per_token == 0.0 < rising.per_token
    assert rising.seconds(flat.until) == pytest.approx(flat.seconds(flat.until))


# Milliseconds per layer of everything but attention and communication, from Vidur's profiles (Microsoft,
# data/profiling/compute, medians): device, KV heads, width of the MLP, tensor parallelism, tokens.
KERNELS = [
    ("A100", 32, 11008, 1, 1, 0.292),
    ("A100", 32, 11008, 1, 128, 0.3855),
    ("A100", 32, 11008, 1, 1024, 2.135),
    ("A100", 32, 11008, 1, 4096, 8.1775),
    ("A100", 8, 14336, 1, 64, 0.354),
    ("A100", 8, 14336, 1, 2048, 4.5165),
    ("H100", 32, 11008, 1, 1, 0.176),
    ("H100", 32, 11008, 1, 128, 0.201),
    ("H100", 32, 11008, 1, 2048, 1.278),
]


@pytest.mark.parametrize(("name", "kv_heads", "width", "tp", "tokens", "milliseconds"), KERNELS)
def test_linear_layers_take_as_long_as_measured_kernels(
    name: str, kv_heads: int, width: int, tp: int, tokens: int, milliseconds: float
) -> None:
    found = costs(replace(llama(kv_heads=kv_heads, intermediate=width), layers=1), device=name, tp=tp)
    assert found.layers(tokens) == pytest.approx(milliseconds / 1e3, rel=0.15)


def test_the_host_adds_to_each_step_and_for_each_sequence() -> None:
    busy = costs(by=replace(IDEAL, host_step=2e-3, host_sequence=1e-4))
    idle = costs(by=IDEAL)
    assert busy.decode(8, 100).seconds(100) - idle.decode(8, 100).seconds(100) == pytest.approx(2.8e-3)
    assert busy.prefill(512, 0, 4) - idle.prefill(512, 0, 4) == pytest.approx(2.4e-3)
    # While the host works the device does not: neighbours have it.
    assert busy.decode_load(8, 100).bandwidth < idle.decode_load(8, 100).bandwidth


@pytest.mark.parametrize("host", [1e-4, 2e-2])
def test_a_step_that_is_scheduled_ahead_takes_as_long_as_the_slower_of_device_and_host(host: float) -> None:
    by = replace(IDEAL, host_step=host, host_sequence=1e-5, launches={"piecewise": Launches(1e-4, 1e-4)})
    ahead, device = costs(by=by, ahead=True), costs(by=IDEAL)
    for context in (100, 200_000):
        own = 32 * 1e-4 + host + 8 * 1e-5
        assert ahead.decode(8, context).seconds(context) == pytest.approx(
            max(device.decode(8, context).seconds(context), own)
        )
    assert ahead.prefill(4096, 0, 2) == pytest.approx(max(device.prefill(4096, 0, 2), 32 * 1e-4 + host + 2 * 1e-5))


@given(
    st.sampled_from(["A100", "L20", "CPU"]),
    st.sampled_from([1, 2, 8]),
    st.floats(0.1, 1.0),
    st.integers(1, 256),
    st.integers(1, 100_000),
    st.booleans(),
)
def test_the_parts_of_a_step_are_its_seconds(
    name: str, tp: int, share: float, batch: int, context: int, ahead: bool
) -> None:
    made = costs(device=name, tp=tp, share=share, dtype="float32" if name == "CPU" else "float16", ahead=ahead)
    step, prompt = made.decode_parts(batch, context), made.prefill_parts(context, context * context // 2, 1)
    assert sum(step) == pytest.approx(made.decode(batch, context).seconds(context))
    assert sum(prompt) == pytest.approx(made.prefill(context, context * context // 2, 1))
    assert min(*step, *prompt) >= -1e-9
    assert (step.communication > 0) == (tp > 1)


def test_what_a_step_waits_for() -> None:
    small = llama(hidden=512, heads=8, kv_heads=8, intermediate=1408)
    cases = {
        "compute": costs(device="H100").prefill_parts(8192, 8192 * 4096, 1),
        "bandwidth": costs(device="H100").decode_parts(8, 8 * 1000),
        "communication": costs(device="L20", tp=8).prefill_parts(8192, 8192 * 4096, 1),
        "host": costs(small, device="H100", graphs="eager").decode_parts(1, 100),
    }
    for part, parts in cases.items():
        assert getattr(parts, part) == max(parts)


def test_graphs_take_the_launches_off_the_host() -> None:
    def step(graphs: str) -> float:
        small = llama(hidden=512, heads=4, kv_heads=4, intermediate=1408)
        return costs(small, device="H100", graphs=graphs).decode(1, 100).seconds(100)

    assert step("full") < step("piecewise") < step("eager")
    # A large batch keeps the device busy for longer than its launches take.
    large = {costs(graphs=graphs).decode(256, 100_000).seconds(100_000) for graphs in ("eager", "piecewise", "full")}
    assert len(large) == 1


def test_links_of_each_kind_have_constants_of_their_own() -> None:
    def reduced(name: str) -> float:
        on = device(name)
        return costs(device=name, tp=2).all_reduces(100_000) * on.link_bandwidth

    # gLLM (arXiv:2504.14775) measured 20.79 GB/s between L20 over PCIe, of 32.
    assert 32e9 * LINKS["pcie"].efficiency == pytest.approx(20.79e9, rel=0.01)
    assert len({LINKS[device(name).link].efficiency for name in ("L20", "A100", "H100")}) == 3
    assert reduced("L20") < reduced("A100")


@given(
    st.sampled_from([SEVEN_B, MIXTRAL]),
    st.sampled_from(["A10", "A100", "H100", "L20", "CPU"]),
    st.sampled_from([1, 2, 8]),
    st.floats(0.05, 1.0),
    st.integers(1, 512),
    st.integers(1, 200_000),
)
def test_more_work_on_less_device_never_takes_less(
    model: object, name: str, tp: int, share: float, batch: int, context: int
) -> None:
    dtype = "float32" if name == "CPU" else "float16"
    less = costs(model, device=name, tp=tp, share=share, dtype=dtype)
    more = costs(model, device=name, tp=tp, share=min(1.0, share * 1.2), dtype=dtype)

    def step(of: RooflineCosts, b: int, c: int) -> float:
        return of.decode(b, c).seconds(c)

    assert 0 < step(more, batch, context) <= step(less, batch, context) * (1 + 1e-9)
    assert step(less, batch, context) <= step(less, batch + 1, context) * (1 + 1e-9)
    assert step(less, batch, context) <= step(less, batch, context + 1) * (1 + 1e-9)
    pairs = batch * (batch + 1) // 2
    assert more.prefill(batch, pairs, 1) <= less.prefill(batch, pairs, 1) * (1 + 1e-9)
    assert less.prefill(batch, pairs, 1) <= less.prefill(batch + 1, pairs + batch + 1, 1) * (1 + 1e-9)
    for load in (less.prefill_load(batch, pairs, 1), less.decode_load(batch, context)):
        assert 0 <= load.bandwidth <= 1
        assert 0 <= load.compute <= 1


def test_the_target_load_is_llumnixs_on_its_gpu_and_follows_costs_elsewhere() -> None:
    # arXiv:2406.03243, section 6.4: 1,600 tokens, LLaMA-7B on an A10.
    assert target_load(costs(device="A10")) == pytest.approx(1600, rel=0.02)
    # More bandwidth for KV beside the same time on the host; a quarter of the KV per token.
    assert target_load(costs(device="H200")) > 1.4 * target_load(costs(device="A10"))
    assert target_load(costs(llama(kv_heads=8))) > 3 * target_load(costs())
    model = costs(device="H100", tp=2, graphs="eager")
    tokens = target_load(model)
    least, at, beyond = (model.decode(1, n).seconds(n) for n in (1, tokens, tokens + 1))
    assert at <= 1.065 * least < beyond


@given(st.integers(1, 256), st.integers(1, 50_000), st.integers(1, 500))
def test_a_run_of_steps_is_the_sum_of_its_steps(batch: int, context: int, steps: int) -> None:
    piece = costs().decode(batch, context)
    total = math.fsum(piece.seconds(context + batch * i) for i in range(steps))
    assert piece.run(batch, context, steps) == pytest.approx(total)


def test_decode_asks_for_bandwidth_and_prefill_for_compute() -> None:
    model = costs()
    decode, prefill = model.decode_load(16, 16 * 500), model.prefill_load(4096, 4096 * 2048, 1)
    assert decode.bandwidth > 0.8 > 0.3 > decode.compute
    assert prefill.compute > 0.7 > prefill.bandwidth
    roofline = Roofline()
    assert roofline.slowdowns("A100", [decode, prefill])[0] < roofline.slowdowns("A100", [decode, decode])[0]
    assert roofline.slowdowns("A100", [decode, Load(0.0, 0.0)])[0] == 1.0
