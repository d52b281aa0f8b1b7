"""How prefill and decode of a model are arranged, as the fleet file says it, and which keys go with which."""

# ruff: noqa: E501 -- one case, one line

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from muxserve.config import AUTO, Fleet, FleetError, Model, parse_fleet
from muxserve.config.loader import fleet_schema
from muxserve.config.source import parse_yaml
from muxserve.planning.arrangements import arrangement_of

HEAD = "models:\n  - name: one\n    architecture: llama-7b\n"
SLO = "    slo: {ttft_ms: 1000, tpot_ms: 100}\n"


def parse(extra: str) -> Fleet:
    return parse_fleet(HEAD + extra, "fleet.yaml", Path(), {}, serving=False)


def batching_of(model: Model) -> str:
    return arrangement_of(model).batching(model)


def test_models_are_multiplexed_unless_they_say_otherwise() -> None:
    (model,) = parse("").models
    assert (model.phases, model.stages, model.rolling.lower, model.rolling.upper) == ("multiplexed", AUTO, 4, 16)
    assert batching_of(model) == "vllm"


def test_a_rolling_model() -> None:
    (model,) = parse(f"    phases: rolling\n    rolling: {{lower: 2, upper: 3, spared: mean}}\n{SLO}").models
    assert (model.rolling.lower, model.rolling.upper, model.rolling.quantile) == (2, 3, None)
    assert parse(f"    phases: rolling\n{SLO}").models[0].rolling.quantile == 0.25
    assert parse(f"    phases: rolling\n    rolling: {{spared: 0}}\n{SLO}").models[0].rolling.quantile == 0.0


def test_a_pipelined_model() -> None:
    (model,) = parse("    phases: pipelined\n    stages: 4\n    batching: fixed\n").models
    assert (model.stages, batching_of(model)) == (4, "fixed")
    assert batching_of(parse("    phases: pipelined\n").models[0]) == "throttled"


def test_auto_takes_what_any_of_them_takes() -> None:
    (model,) = parse(
        "    phases: auto\n    rolling: {lower: 2}\n    stages: 2\n    batching: vllm\n    sm: {prefill: 0.5}\n"
    ).models
    assert model.phases == AUTO


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("phases: piplined", '4: models[0].phases: must be one of multiplexed, rolling, pipelined, auto, not \'piplined\'; did you mean "pipelined"?'),
        ("phases: rolling", "4: models[0].phases: `phases: rolling` needs slo.ttft_ms and slo.tpot_ms: prefill rolls on when the next would miss them"),
        ("phases: rolling\nslo: {ttft_ms: 5}", "5: models[0].slo: `phases: rolling` needs slo.tpot_ms: prefill rolls on when the next would miss them"),
        ("stages: 2", "4: models[0].stages: is for `phases: pipelined` or `phases: auto`, not for the default, `phases: multiplexed`"),
        ("batching: fixed\nphases: multiplexed", "4: models[0].batching: is for `phases: pipelined` or `phases: auto`, not for `phases: multiplexed`"),
        ("phases: pipelined\nrolling: {}", "5: models[0].rolling: is for `phases: rolling` or `phases: auto`, not for `phases: pipelined`"),
        ("phases: pipelined\nsm: {decode: 0.5}", "5: models[0].sm: is for `phases: multiplexed`; under `phases: pipelined` the model's one engine has all SMs"),
        ("phases: pipelined\nstages: 0", "5: models[0].stages: must be a whole number of at least 1, or auto, not 0"),
        ("phases: auto\nrolling: {lower: 4, upper: 6}", "5: models[0].rolling.upper: upper (6) must be at least 2 * lower - 1 (7): a macro instance that grows beyond upper is split, and both parts need lower (4) replicas"),
        ("phases: auto\nrolling: {lower: 9}", "5: models[0].rolling.lower: upper (16) must be at least 2 * lower - 1 (17): a macro instance that grows beyond upper is split, and both parts need lower (9) replicas"),
        ("phases: auto\nrolling: {spared: 1}", "5: models[0].rolling.spared: must be a number of at least 0 and below 1, or mean, not 1"),
        ("phases: auto\nrolling: {spared: median}", "5: models[0].rolling.spared: must be a number of at least 0 and below 1, or mean, not 'median'"),
        ("phases: auto\nrolling: {N_l: 4}", "5: models[0].rolling.N_l: unknown key; known here: lower, upper, spared"),
        ("phases: pipelined\nbatching: throtled", '5: models[0].batching: must be one of throttled, fixed, vllm, not \'throtled\'; did you mean "throttled"?'),
        ("phases: pipelined\nbatching: {policy: fixed, iterations: 3}", "5: models[0].batching: is one of throttled, fixed and vllm: write `batching: fixed`"),
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
        ("    phases: auto\n    stages: auto\n    rolling: {spared: mean}\n", True),
        ("    phases: pipelined\n    stages: 3\n    batching: fixed\n", True),
        ("    phases: rolling\n    rolling: {spared: 0.5}\n", True),
        ("    phases: both\n", False),
        ("    rolling: {spared: 1.0}\n", False),
        ("    stages: 0\n", False),
        ("    batching: {policy: fixed}\n", False),
    ],
)
def test_what_editors_are_told(extra: str, good: bool) -> None:
    data = parse_yaml(HEAD + extra, "fleet.yaml").data
    assert Draft202012Validator(fleet_schema()).is_valid(data) is good
