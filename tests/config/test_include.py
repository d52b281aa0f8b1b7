"""A fleet of several files, what its models have in common, and where mistakes in all of that are said to be."""

# ruff: noqa: E501 -- one case, one line

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from muxserve.config import Fleet, FleetError, load_fleet, parse_fleet
from muxserve.config.include import files_of
from muxserve.config.loader import fleet_schema
from tests.support.checkpoint_files import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FLEET = "include: [teams/*.yaml, keys.yaml]\nmodels:\n  - {name: own, path: own}\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name in ("own", "teams/blue-model", "teams/red-model"):
        (tmp_path / name).mkdir(parents=True)
        write_checkpoint(tmp_path / name)
    (tmp_path / "keys").write_text("sk-1\n")
    (tmp_path / "teams/key").write_text("sk-2\n")
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "keys.yaml").write_text("gateway: {api_keys: file:keys, port: 0}\n")
    (tmp_path / "teams/blue.yaml").write_text(
        "x-mine: 1\ntenants:\n  blue: {keys: [file:key]}\nmodels:\n  - name: blue\n    path: blue-model\n"
    )
    (tmp_path / "teams/red.yaml").write_text("x-mine: 2\nmodels:\n  - name: red\n    path: red-model\n    rate: 3\n")
    return tmp_path


def problems(base: Path, **environ: str) -> list[str]:
    with pytest.raises(FleetError) as caught:
        load_fleet(base / "fleet.yaml", environ)
    return [str(problem).replace(f"{base}/", "") for problem in caught.value.problems]


def test_files_are_one_fleet_with_paths_of_their_own(base: Path) -> None:
    fleet = load_fleet(base / "fleet.yaml")
    assert [(model.name, model.path) for model in fleet.models] == [
        ("own", str(base / "own")),
        ("blue", str(base / "teams/blue-model")),
        ("red", str(base / "teams/red-model")),
    ]
    assert fleet.gateway.keys == ["sk-1"]
    assert fleet.tenants["blue"].keys == ["sk-2"]
    # Nothing of it is a difference for `apply`.
    assert not {"include", "model_defaults"} & set(fleet.model_dump())


def test_an_included_file_may_include_others_and_be_named_by_a_variable(base: Path) -> None:
    (base / "fleet.yaml").write_text("include: env:MORE\n")
    (base / "teams/all.yml").write_text("include: red.yaml\n")
    fleet = load_fleet(base / "fleet.yaml", {"MORE": "teams/all.yml"})
    assert [model.name for model in fleet.models] == ["red"]


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("teams/red.yaml", "models:\n  - name: red\n    path: red-model\n    rat: 3\n",
         'teams/red.yaml:4: models[0].rat: unknown key; did you mean "rate"?'),
        ("teams/red.yaml", "models:\n  - name: red\n    path: nowhere\n",
         "teams/red.yaml:3: models[0].path: teams/nowhere does not exist"),
        ("teams/red.yaml", "models:\n  - name: own\n    path: red-model\n",
         "teams/red.yaml:2: models[0].name: 'own' is already the name of the model on fleet.yaml:3"),
        ("teams/red.yaml", "gateway: {port: 8000}\n",
         "keys.yaml:1: gateway.port: is given at teams/red.yaml:1 already; keep one"),
        ("teams/red.yaml", "models: [\n", "teams/red.yaml:2: not valid YAML"),
        ("teams/red.yaml", "- 1\n", "teams/red.yaml:1: must be a mapping, as a fleet file is"),
        ("teams/red.yaml", "models: {}\n", "teams/red.yaml:1: models: must be a list, here and where it is included"),
        ("teams/red.yaml", "include: ../fleet.yaml\n",
         "teams/red.yaml:1: include: is a circle: teams/../fleet.yaml includes this file; remove one of the two"),
        ("teams/red.yaml", "include: red.yaml\n",
         "teams/red.yaml:1: include: is a circle: teams/red.yaml includes this file; remove one of the two"),
        ("teams/red.yaml", "include: blue.yaml\n",
         "teams/red.yaml:1: include: teams/blue.yaml is included at fleet.yaml:1 already"),
        ("fleet.yaml", "include: [none.yaml]\nmodels: []\n", "fleet.yaml:1: include[0]: none.yaml: there is no such file"),
        ("fleet.yaml", "include: no*.yaml\nmodels: []\n", "fleet.yaml:1: include: 'no*.yaml' matches no file"),
        ("fleet.yaml", "include: env:MORE\n", "fleet.yaml:1: include: the environment variable MORE is not set; "
         "export it, or write its value here"),
        ("fleet.yaml", "include: 3\nmodels: []\n", "fleet.yaml:1: include: must be a file or a list of files, not 3"),
    ],
)  # fmt: skip
def test_mistakes_are_where_they_were_written(base: Path, file: str, text: str, expected: str) -> None:
    (base / file).write_text(text)
    (found,) = problems(base)
    assert found.startswith(expected)


def test_a_text_from_elsewhere_reads_no_file(base: Path) -> None:
    with pytest.raises(FleetError, match="a file from elsewhere cannot include files"):
        parse_fleet(FLEET, "fleet.yaml", base, {}, local=False)


def test_every_file_that_counts_is_known_also_of_a_broken_fleet(base: Path) -> None:
    def names() -> set[str]:
        files = files_of(base / "fleet.yaml", {})
        assert files.patterns == [f"{base}/teams/*.yaml"]
        return {str(file.relative_to(base)) for file in files.read}

    whole = {"fleet.yaml", "teams/blue.yaml", "teams/red.yaml", "keys.yaml", "teams/key", "keys"}
    assert names() == whole
    (base / "teams/blue.yaml").write_text("models: [\n")
    assert names() >= whole - {"keys", "teams/key"}


# ---------------------------------------------------------------- model_defaults


def with_defaults(defaults: str, models: str) -> Fleet:
    return parse_fleet(f"model_defaults: {defaults}\nmodels:\n{models}", "fleet.yaml", Path("/"), {"D": "/d"})


def test_models_have_what_they_do_not_say() -> None:
    fleet = with_defaults(
        "{rate: 3, slo: {ttft_ms: 500, tpot_ms: 50}, engine_args: {download_dir: env:D, seed: 1}}",
        "  - {name: a, hub: x/a}\n  - {name: b, hub: x/b, rate: 7, slo: {tpot_ms: 20}, engine_args: {seed: 2}}\n",
    )
    a, b = fleet.models
    assert (a.rate, a.slo.ttft_ms, a.slo.tpot_ms, a.engine_args) == (3, 500, 50, {"download_dir": "/d", "seed": 1})
    assert (b.rate, b.slo.ttft_ms, b.slo.tpot_ms, b.engine_args) == (7, 500, 20, {"download_dir": "/d", "seed": 2})
    assert fleet.model_problem("a", "slo", "x").line == 1
    assert fleet.model_problem("b", "slo", "x").line == 4


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ("{rat: 3}", 'fleet.yaml:1: model_defaults.rat: unknown key; did you mean "rate"?'),
        ("{rate: often}", "fleet.yaml:1: model_defaults.rate: must be a number, not the text 'often'"),
        ("{path: a}", "fleet.yaml:1: model_defaults.path: unknown key; `path` belongs under `models`"),
        ("{engine_args: {max_model_len: 3}}",
         "fleet.yaml:1: model_defaults.engine_args.max_model_len: is set by `max_len` of the model; move it there"),
        ("{engine_args: {download_dir: env:NOT}}",
         "fleet.yaml:1: model_defaults.engine_args.download_dir: the environment variable NOT is not set; export it, or "
         "write its value here"),
        ("[]", "fleet.yaml:1: model_defaults: must be a mapping, not a list"),
    ],
)  # fmt: skip
def test_a_wrong_default_is_one_mistake(defaults: str, expected: str) -> None:
    with pytest.raises(FleetError) as caught:
        with_defaults(defaults, "  - {name: a, hub: x/a}\n  - {name: b, hub: x/b}\n")
    assert [str(problem) for problem in caught.value.problems] == [expected]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "Qwen/Qwen3-0.6B",
            "write `name: Qwen3-0.6B`, and `aliases: [Qwen/Qwen3-0.6B]` for clients that ask for it so",
        ),
        ("qwen:7b", "write `name: qwen-7b`, and `aliases: [qwen:7b]` for clients that ask for it so"),
    ],
)
def test_a_name_as_the_hub_has_it_is_an_alias(name: str, hint: str) -> None:
    with pytest.raises(FleetError) as caught:
        with_defaults("{}", f'  - {{name: "{name}", hub: x/a}}\n')
    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("include: a.yaml\nmodels: [{name: a, hub: x/y}]", True),
        ("include: [a.yaml]\nmodel_defaults: {rate: 3}\nmodels: [{name: a, hub: x/y}]", True),
        ("include: [3]\nmodels: [{name: a, hub: x/y}]", False),
        ("model_defaults: {name: a}\nmodels: [{name: a, hub: x/y}]", False),
        ("model_defaults: {rat: 1}\nmodels: [{name: a, hub: x/y}]", False),
        ("models: [{hub: x/y}]", False),
    ],
)
def test_editors_know_both(text: str, good: bool) -> None:
    assert jsonschema.Draft202012Validator(fleet_schema()).is_valid(yaml.safe_load(text)) is good


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_the_repositorys_fleet_files_name_their_schema(file: Path) -> None:
    (named,) = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", file.read_text().splitlines()[0])
    schema = json.loads((file.parent / named).read_text())
    assert jsonschema.Draft202012Validator(schema).is_valid(yaml.safe_load(file.read_text()))
