"""Stages of a pipeline: layers, memory, and what mixed micro-batches cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.costs import EngineShape
from muxserve.costs.architecture import split_layers
from muxserve.costs.calibration import GPU
from muxserve.costs.roofline import Roofline
from muxserve.costs.stages import stage_architectures
from muxserve.costs.step_costs import StepWork
from muxserve.simulator import Link, Pipeline
from muxserve.simulator.stages import Stage, kv_blocks, make_stages
from tests.simulator.support import LARGE as MODEL
from tests.simulator.support import Linear

SHAPE = EngineShape("L20-48GB")
FOUR = Pipeline((12,) * 4, (Link(),) * 3)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(48, 4, (12, 12, 12, 12)), (10, 4, (2, 3, 3, 2)), (11, 4, (3, 3, 3, 2)), (5, 2, (3, 2)), (7, 1, (7,))],
)
def test_layers_are_split_evenly(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    assert split_layers(layers, stages) == expected


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be spread over 4 stages"):
        split_layers(3, 4)


@given(layers=st.integers(1, 200), stages=st.integers(1, 16))
def test_all_layers_are_somewhere(layers: int, stages: int) -> None:
    if stages <= layers:
        split = split_layers(layers, stages)
        assert sum(split) == layers
        assert max(split) - min(split) <= 1
        assert split[-1] == min(split)


def test_the_parts_add_up_to_the_model() -> None:
    parts = stage_architectures(MODEL, split_layers(48, 4))
    assert [part.layers for part in parts] == [12] * 4
    # The vocabulary has two matrices: embeddings are looked up and cost nothing.
    assert sum(part.parameters for part in parts) == MODEL.parameters
    assert [part.vocab for part in parts] == [0, 0, 0, MODEL.vocab]


def test_each_stage_has_its_own_room_for_kv() -> None:
    gib = 40 * 2**30
    first, second, third, last = kv_blocks(MODEL, "bfloat16", 4, [gib] * 4)
    layer_weights = (MODEL.parameters - 2 * MODEL.vocab * MODEL.hidden) / 4 * 2
    block = 12 * 8 * 128 * 2 * 2 * 16
    assert second == third == (gib - layer_weights) // block
    # Embeddings here, the LM head there.
    assert first == last == (gib - layer_weights - MODEL.vocab * MODEL.hidden * 2) // block
    (alone,) = kv_blocks(MODEL, "bfloat16", 1, [4 * gib])
    assert alone == (4 * gib - MODEL.weight_bytes("bfloat16")) // (4 * block)
    tied = replace(MODEL, tied_embeddings=True)
    assert kv_blocks(tied, "bfloat16", 4, [gib] * 4) == (first, second, third, last)
    assert kv_blocks(tied, "bfloat16", 1, [4 * gib])[0] > alone


def test_layers_may_be_assigned() -> None:
    # The LM head weighs as much as two or three layers: the last stage has fewer.
    split = (13, 13, 12, 10)
    gib = 40 * 2**30
    blocks = kv_blocks(MODEL, "bfloat16", 4, [gib] * 4, split=split)
    assert blocks[3] > blocks[2] > blocks[1] > blocks[0]
    even, assigned = (
        [
            stage.seconds(StepWork(64, 1, 2080, 64, 20_000))
            for stage in make_stages(Pipeline(layers, (Link(),) * 3), Roofline(), MODEL, SHAPE)
        ]
        for layers in ((12,) * 4, split)
    )
    assert max(assigned) - min(assigned) < 0.7 * (max(even) - min(even))
    with pytest.raises(ValueError, match="48 layers over 4 stages are not 12, 12, 12, 13"):
        make_stages(Pipeline((12, 12, 12, 13), (Link(),) * 3), Roofline(), MODEL, SHAPE)
    with pytest.raises(ValueError, match="over 4 stages are not 24, 24"):
        kv_blocks(MODEL, "bfloat16", 4, [gib] * 4, split=(24, 24))


def test_memory_that_does_not_hold_the_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage 0 has 6\.0 GiB, of which its weights take 7\.\d: no room"):
        kv_blocks(MODEL, "bfloat16", 4, [6 * 2**30] * 4)
    with pytest.raises(ValueError, match="4 stages have 3 memories"):
        kv_blocks(MODEL, "bfloat16", 4, [6 * 2**30] * 3)


# ------------------------------------------------------------ mixed micro-batches


def test_steps_of_one_kind_cost_what_the_latency_model_says() -> None:
    costs = Roofline().engine(stage_architectures(MODEL, split_layers(48, 4))[0], SHAPE)
    stage = make_stages(FOUR, Roofline(), MODEL, SHAPE)[0]
    assert stage.seconds(StepWork(512, 2, 70_000, 0, 0)) == costs.prefill(512, 70_000, 2)
    assert stage.seconds(StepWork(0, 0, 0, 64, 20_000)) == costs.decode(64, 20_000).seconds(20_000)


def test_a_mixed_step_reads_weights_once_and_adds_both_attentions() -> None:
    costs = Roofline().engine(stage_architectures(MODEL, split_layers(48, 4))[0], SHAPE)
    stage = make_stages(FOUR, Roofline(), MODEL, SHAPE)[0]
    reading = costs.decode(64, 1 << 30).per_token * 40_000
    mixed = stage.seconds(StepWork(512, 2, 70_000, 64, 40_000))
    assert mixed == pytest.approx(costs.prefill(576, 70_000, 66) + reading, rel=1e-6)
    alone = stage.seconds(StepWork(512, 2, 70_000, 0, 0)) + stage.seconds(StepWork(0, 0, 0, 64, 40_000))
    assert mixed < alone


def test_a_step_that_waits_for_the_host_waits_once() -> None:
    # A device so fast that launching is all there is to it.
    quick = replace(MODEL, hidden=512, intermediate=512, heads=4, kv_heads=4)
    stage = make_stages(FOUR, Roofline(), quick, SHAPE)[0]
    floor = stage.seconds(StepWork(1, 1, 1, 0, 0))
    assert stage.seconds(StepWork(8, 1, 36, 8, 1000)) == pytest.approx(floor + 8 * GPU.host_sequence)


def test_latency_models_that_know_no_pairs_add_the_reading_of_kv() -> None:
    stage = Stage(Linear())
    assert stage.seconds(StepWork(100, 1, 5050, 10, 5000)) == pytest.approx(0.001 + 0.00005 * 110 + 0.000001 * 5000)


@given(
    prefill=st.integers(1, 4000), decode=st.integers(1, 500), context=st.integers(500, 500_000), more=st.integers(1, 99)
)
def test_more_work_never_takes_less_time(prefill: int, decode: int, context: int, more: int) -> None:
    stage = make_stages(FOUR, Roofline(), MODEL, SHAPE)[3]
    pairs = prefill * (prefill + 1) // 2
    work = StepWork(prefill, 1, pairs, decode, context)
    seconds = stage.seconds(work)
    assert stage.seconds(StepWork(prefill + more, 1, pairs, decode, context)) >= seconds
    assert stage.seconds(StepWork(prefill, 1, pairs + more, decode, context)) >= seconds
    assert stage.seconds(StepWork(prefill, 1, pairs, decode + more, context)) >= seconds
    assert stage.seconds(StepWork(prefill, 1, pairs, decode, context + 100 * more)) >= seconds
    assert seconds >= stage.seconds(StepWork(prefill, 1, pairs, 0, 0))
