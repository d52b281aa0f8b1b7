"""The engines of a model, as the fleet file says it, and which keys go with which."""

# ruff: noqa: E501 -- one case, one line

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from muxserve.config import AUTO, Fleet, FleetError, parse_fleet
from muxserve.config.loader import fleet_schema
from muxserve.config.source import parse_yaml

HEAD = "models:\n  - name: one\n    architecture: llama-7b\n"
SLO = "    slo: {ttft_ms: 1000, tpot_ms: 100}\n"


def parse(extra: str) -> Fleet:
    return parse_fleet(HEAD + extra, "fleet.yaml", Path(), {}, serving=False)


def test_what_a_model_has_that_says_nothing() -> None:
    (model,) = parse("").models
    assert (model.shape, model.stages, model.rolls) == ("one", AUTO, False)


def test_a_rolling_model() -> None:
    (model,) = parse(f"    dispatch: rolling\n{SLO}").models
    assert (model.shape, model.rolls) == ("one", True)


@pytest.mark.parametrize(
    ("extra", "shape", "stages"),
    [
        ("engines: split", "split", 1),
        ("engines: one", "one", 1),
        ("stages: 4", "one", 4),
        ("engines: one\nstages: 1\nsm: {decode: 0.5}", "one", 1),
        ("engines: auto\nsm: {decode: 0.5}", "one", 1),
    ],
)
def test_shapes(extra: str, shape: str, stages: int) -> None:
    (model,) = parse("".join(f"    {line}\n" for line in extra.split("\n"))).models
    assert (model.shape, model.stage_count) == (shape, stages)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("engines: two", "4: models[0].engines: must be one of auto, split, one, not 'two'"),
        ("phases: rolling", "4: models[0].phases: is no longer a key; write `engines: split` for multiplexed, `engines: auto` for auto, `dispatch: rolling` for rolling, and `stages: 2` or more for pipelined"),
        ("dispatch: rolling", "4: models[0].dispatch: `dispatch: rolling` needs slo.ttft_ms and slo.tpot_ms: prefill rolls on when the next would miss them"),
        ("dispatch: rolling\nslo: {ttft_ms: 5}", "5: models[0].slo: `dispatch: rolling` needs slo.tpot_ms: prefill rolls on when the next would miss them"),
        ("dispatch: rolling\nslo: {ttft_ms: 5, tpot_ms: 1}\nstages: 2", "6: models[0].stages: must be 1 where prefill rolls over replicas, each of which has one stage; leave one of the two out"),
        ("engines: split\nstages: 2", "5: models[0].stages: is for models with one engine; write `engines: one`, or leave it out"),
        ("engines: one\nsm: {prefill: 0.5}", "5: models[0].sm.prefill: is for `engines: split`; the share of a model's one engine is `sm.decode`"),
        ("sm: {prefill: 0.5}", "4: models[0].sm.prefill: is for `engines: split`; the share of a model's one engine is `sm.decode`"),
        ("stages: 2\nsm: {decode: 0.5}", "5: models[0].sm: is for models that share GPUs; this one has GPUs to itself; leave it out"),
        ("engines: one\nstages: 0", "5: models[0].stages: must be a whole number of at least 1, or auto, not 0"),
        ("rolling: {lower: 9}", "4: models[0].rolling: is no longer a key; remove it: macro instances have 4 to 16 replicas, and a quarter of the decodes may have saved less time than a prefill takes (docs/rolling.md)"),
        ("batching: throttled", "4: models[0].batching: is no longer a key; remove it: steps over several stages are throttled, and others are vLLM's own"),
        ("engine_args: {pipeline_parallel_size: 2}", "4: models[0].engine_args.pipeline_parallel_size: is set by `stages` of the model; move it there"),
    ],
)  # fmt: skip
def test_mistakes(extra: str, expected: str) -> None:
    with pytest.raises(FleetError) as caught:
        parse("".join(f"    {line}\n" for line in extra.split("\n")))
    assert str(caught.value) == f"fleet.yaml:{expected}"


@pytest.mark.parametrize(
    ("extra", "good"),
    [
        ("    engines: auto\n    stages: auto\n    dispatch: auto\n", True),
        ("    engines: one\n    stages: 3\n", True),
        ("    engines: both\n", False),
        ("    stages: 0\n", False),
        ("    batching: fixed\n", False),
    ],
)
def test_what_editors_are_told(extra: str, good: bool) -> None:
    data = parse_yaml(HEAD + extra, "fleet.yaml").data
    assert Draft202012Validator(fleet_schema()).is_valid(data) is good
