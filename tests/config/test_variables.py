"""Variables of the environment: for secrets and paths, and never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.config import FleetError, parse_fleet
from tests.support.checkpoint_files import write_checkpoint, write_safetensors

ONE = "models:\n  - name: one\n    hub: org/one\n"


def problems(text: str, local: bool = True, **environ: str) -> list[str]:
    with pytest.raises(FleetError) as caught:
        parse_fleet(text, "fleet.yaml", Path("/"), environ, local=local)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"gateway: {{api_keys: '${{KEY}}'}}\n{ONE}", "gateway.api_keys"),
        (f"gateway: {{api_keys: ['sk-${{KEY}}']}}\n{ONE}", "gateway.api_keys[0]"),
        (f"gateway: {{api_keys: [{{key: '${{KEY}}'}}]}}\n{ONE}", "gateway.api_keys[0].key"),
        (f"tenants: {{a: {{keys: ['env:${{KEY}}']}}}}\n{ONE}", "tenants.a.keys[0]"),
        ("models:\n  - name: one\n    path: ${KEY}/one\n", "models[0].path"),
        (f"gateway: {{tls: {{cert: '${{KEY}}', key: k}}}}\n{ONE}", "gateway.tls.cert"),
        (f"{ONE}    engine_args: {{chat_template: '${{KEY}}/x'}}\n", "models[0].engine_args.chat_template"),
    ],
)
def test_what_a_shell_would_fill_in_is_refused(text: str, place: str) -> None:
    line = "3" if "    path" in text else "4" if "chat_template" in text else "1"
    told = f"fleet.yaml:{line}: {place}: `${{KEY}}` would be taken as it stands; write `env:KEY` instead"
    assert told in problems(text, KEY="sk-1")


def test_a_path_may_stand_in_a_variable(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    write_safetensors(tmp_path / "x/adapter_model.safetensors")
    text = """
gateway: {usage_file: env:USAGE, api_keys: env:KEYS}
models:
  - {name: a, path: env:WEIGHTS, adapters: {x: env:ADAPTER}, engine_args: {tokenizer: env:WEIGHTS, hf_token: env:KEYS}}
"""
    environ = {"USAGE": "u.sqlite", "KEYS": "k1,k2", "WEIGHTS": "m", "ADAPTER": str(tmp_path / "x")}
    fleet = parse_fleet(text, "fleet.yaml", tmp_path, environ)
    (model,) = fleet.models
    assert (model.path, model.adapters) == (str(tmp_path / "m"), {"x": str(tmp_path / "x")})
    assert model.engine_args == {"tokenizer": "m", "hf_token": "k1,k2"}
    assert fleet.gateway.usage_file == str(tmp_path / "u.sqlite")
    assert fleet.gateway.keys == ["k1", "k2"]


def test_a_variable_that_is_not_set() -> None:
    (said,) = problems("models:\n  - {name: a, path: env:NOWHERE}\n")
    told = "models[0].path: the environment variable NOWHERE is not set; export it, or write its value here"
    assert said == f"fleet.yaml:2: {told}"


def test_whoever_is_elsewhere_reads_no_variables() -> None:
    (said,) = problems("models:\n  - {name: a, path: env:SECRET}\n", local=False, SECRET="sk-1")
    assert said == "fleet.yaml:2: models[0].path: names a variable, which a file from elsewhere may do for keys only"
