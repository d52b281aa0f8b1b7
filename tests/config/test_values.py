"""What a good fleet file becomes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from muxserve.config import FleetError, load_fleet, parse_fleet
from muxserve.config.loader import fleet_schema, fleet_schema_text
from muxserve.config.values import parse_duration, parse_size, parse_speed
from muxserve.planning.specs.unit_specs import gateway_of, tenants_of
from muxserve.spec import ResponsesSpec, TenantLimits
from tests.support.checkpoint_files import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ONE = "models:\n  - name: one\n    hub: org/one\n"


def test_kept_responses(tmp_path: Path) -> None:
    def kept(text: str) -> ResponsesSpec | None:
        return gateway_of(parse_fleet(f"gateway: {{responses: {text}}}\n{ONE}", "f", tmp_path, {})).responses

    file = str(tmp_path / "responses.sqlite")
    assert (kept("off"), kept("on")) == (None, ResponsesSpec(file, 256 << 20, 30 * 86400.0))
    other = kept("x.sqlite")
    assert other == ResponsesSpec(str(tmp_path / "x.sqlite"), 256 << 20, 30 * 86400.0)


def test_tenants(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("k1\n\n  k2\n")
    text = f"""
gateway: {{api_keys: [file:secret-of-operator, plain]}}
tenants:
  research: {{keys: [file:secret, env:MORE], models: [one], priority: high,
    requests_per_minute: 60, tokens_per_minute: 1000}}
  support: {{keys: [env:OTHER], max_concurrency: 4, admin: true, share_prefixes: true}}
{ONE}"""
    (tmp_path / "secret-of-operator").write_text("op")
    fleet = parse_fleet(text, "f", tmp_path, {"MORE": "k3,k4", "OTHER": "k5"})
    assert fleet.gateway.keys == ["op", "plain"]
    assert fleet.tenants["research"].keys == ["k1", "k2", "k3", "k4"]
    assert fleet.gateway.usage_file == str(tmp_path / "usage.sqlite")
    research, support = tenants_of(fleet)
    assert (research.models, research.priority, research.limits) == (("one",), "high", TenantLimits(60, 1000))
    assert (support.models, support.limits, support.admin) == (None, TenantLimits(max_concurrency=4), True)
    assert (research.shares_prefixes, support.shares_prefixes) == (False, True)
    assert research.key_hashes[0] == hashlib.sha256(b"k1").hexdigest()
    assert "k1" not in str(research)


def test_defaults() -> None:
    fleet = parse_fleet(ONE, "fleet.yaml", Path("/"), {})
    model = fleet.models[0]
    assert (fleet.policy, fleet.cluster.cores, fleet.kv_pool.size) == ("slack", "auto", "auto")
    assert (fleet.gateway.host, fleet.gateway.port, fleet.gateway.api_keys) == ("127.0.0.1", 8000, [])
    assert (model.rate, model.dtype, model.max_len, model.prefix_caching) == (1.0, "auto", "auto", True)
    assert model.slo.ttft_ms is None


def test_values() -> None:
    text = f"""\
cluster: auto
policy: fcfs
kv_pool: {{size: 1.5GiB}}
gateway: {{host: 0.0.0.0, port: 0, api_keys: [plain, env:KEYS], max_body: 1MB, drain_seconds: 2m}}
{ONE}    rate: 3
    slo: {{ttft_ms: 1.5s, tpot_ms: 20}}
    max_len: 512
    limits: {{max_concurrency: 2, max_queue: 0, max_wait: 1500ms}}
    engine_args: {{trust_remote_code: false}}
"""
    fleet = parse_fleet(text, "fleet.yaml", Path("/"), {"KEYS": "k1, k2,plain"})
    assert fleet.kv_pool.size == 3 << 29
    assert fleet.gateway.keys == ["plain", "k1", "k2"]
    assert (fleet.gateway.max_body, fleet.gateway.drain_seconds) == (1_000_000, 120.0)
    model = fleet.models[0]
    assert (model.rate, model.slo.ttft_ms, model.slo.tpot_ms, model.max_len) == (3.0, 1500.0, 20.0, 512)
    assert (model.limits.max_concurrency, model.limits.max_queue, model.limits.max_wait) == (2, 0, 1.5)
    assert model.engine_args == {"trust_remote_code": False}


def test_one_key_may_stand_alone() -> None:
    assert parse_fleet(f"gateway: {{api_keys: secret}}\n{ONE}", "f", Path("/"), {}).gateway.keys == ["secret"]


def test_replicas_are_a_number_or_bounds() -> None:
    text = "models:\n  - {name: one, hub: a/b}\n  - {name: two, hub: a/b, replicas: 3}\n"
    text += "  - {name: more, hub: a/b, replicas: {min: 0, max: 4, idle: 5m, wake: 30s}}\n"
    text += "  - {name: asleep, hub: a/b, replicas: {min: 0, max: 1, start: 0}}\n"
    one, two, more, asleep = (model.replicas for model in parse_fleet(text, "f", Path("/"), {}).models)
    assert [(r.min, r.max, r.at_start, r.scales) for r in (one, two, more, asleep)] == [
        (1, 1, 1, False),
        (3, 3, 3, False),
        (0, 4, 1, True),
        (0, 1, 0, True),
    ]
    assert (more.idle, more.wake) == (300.0, 30.0)


def test_priorities_belong_to_keys() -> None:
    text = """\
priorities: {gold: {rank: 2, target_load: 1000}, normal: {rank: -1}}
gateway: {count: 2, api_keys: [{key: env:GOLD, priority: gold}, plain, {key: other}]}
"""
    fleet = parse_fleet(text + ONE, "f", Path("/"), {"GOLD": "g1,g2"})
    assert fleet.gateway.keys == ["g1", "g2", "plain", "other"]
    assert fleet.gateway.key_priorities == {"g1": "gold", "g2": "gold"}
    assert fleet.gateway.count == 2
    assert {name: (level.rank, level.target_load) for name, level in fleet.priorities.items()} == {
        "gold": (2, 1000),
        "normal": (-1, None),
    }
    alone = parse_fleet(f"gateway: {{api_keys: {{key: k, priority: high}}}}\n{ONE}", "f", Path("/"), {})
    assert alone.priorities["high"].target_load == "auto"
    assert alone.gateway.key_priorities == {"k": "high"}


@pytest.mark.parametrize(("text", "bandwidth"), [("on", None), ("{bandwidth: 1GiB}", 1 << 30), ("off", "off")])
def test_migration_is_a_switch_or_rules(text: str, bandwidth: object) -> None:
    migration = parse_fleet(f"migration: {text}\n{ONE}", "f", Path("/"), {}).migration
    assert ("off" if migration is None else migration.bandwidth) == bandwidth


def test_launchers() -> None:
    cluster = parse_fleet(f"cluster: {{launcher: ray, ray: {{placement: pack}}}}\n{ONE}", "f", Path("/"), {}).cluster
    assert (cluster.launcher, cluster.ray.address, cluster.ray.placement) == ("ray", "auto", "pack")


def test_a_part_of_a_fleet_tells_mistakes_at_their_place_in_the_file() -> None:
    fleet = parse_fleet(f"{ONE}  - name: two\n    hub: org/two\n", "f", Path("/"), {})
    part = fleet.with_models([fleet.model("two")])
    assert str(part.model_problem("two", "hub", "gone")) == "f:5: models[1].hub: gone"
    assert str(part.problem(("policy",), "odd")) == "f:1: policy: odd"


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("models: [{name: a, hub: x/y, replicas: 2}]", True),
        ("models: [{name: a, hub: x/y, replicas: {min: 0, max: 3, idle: 5s}}]", True),
        ("models: [{name: a, hub: x/y, replicas: 0}]", False),
        ("models: [{name: a, hub: x/y, replicas: {min: 1}}]", False),
        ("gateway: {api_keys: k}\nmodels: [{name: a, hub: x/y}]", True),
        ("gateway: {api_keys: [k, {key: l, priority: high}]}\nmodels: [{name: a, hub: x/y}]", True),
        ("gateway: {api_keys: [{priority: high}]}\nmodels: [{name: a, hub: x/y}]", False),
        ("migration: off\nmodels: [{name: a, hub: x/y}]", True),
        ("migration: {bandwidth: 1GiB}\nmodels: [{name: a, hub: x/y}]", True),
        ("migration: {models: on}\nmodels: [{name: a, hub: x/y}]", False),
        ("migration: 3\nmodels: [{name: a, hub: x/y}]", False),
        ("watchdog: off\nmodels: [{name: a, hub: x/y}]", True),
        ("watchdog: {hung: 3s}\nmodels: [{name: a, hub: x/y}]", False),
        ("gateway: {responses: answers.sqlite}\nmodels: [{name: a, hub: x/y}]", True),
        ("gateway: {responses: {keep: 3h}}\nmodels: [{name: a, hub: x/y}]", False),
        ("priorities: {normal: {rank: 0}}\nmodels: [{name: a, hub: x/y}]", True),
        ("priorities: {normal: {}}\nmodels: [{name: a, hub: x/y}]", False),
    ],
)
def test_the_schema_knows_what_the_file_may_say(text: str, good: bool) -> None:
    assert jsonschema.Draft202012Validator(fleet_schema()).is_valid(yaml.safe_load(text)) is good
    try:
        parse_fleet(text, "f", Path("/"), {})
        parsed = True
    except FleetError:
        parsed = False
    assert parsed is good


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fleets").mkdir()
    checkpoint = tmp_path / "models" / "x"
    write_checkpoint(checkpoint)
    (tmp_path / "fleets/f.yaml").write_text("models: [{name: x, path: ../models/x}]\n")
    monkeypatch.chdir("/")
    path = load_fleet(tmp_path / "fleets/f.yaml").models[0].path
    assert path is not None
    assert Path(path).is_absolute()
    assert Path(path).resolve() == checkpoint.resolve()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.write_bytes(b"models:\n  - \xff\n"), ":2: is not UTF-8 text"),
    ],
)
def test_files_that_cannot_be_read(make: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    make(path)  # type: ignore[operator]
    with pytest.raises(FleetError, match=words):
        load_fleet(path)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512MiB", 512 << 20), ("512 mib", 512 << 20), ("2GB", 2 * 10**9), ("1.5k", 1500), (7, 7)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@given(st.one_of(st.text(), st.floats(), st.none(), st.booleans(), st.lists(st.integers()), st.integers(max_value=0)))
def test_no_other_size(value: object) -> None:
    try:
        size = parse_size(value)
    except ValueError:
        return
    assert size > 0
    assert isinstance(value, str)


@given(st.one_of(st.text(), st.floats(), st.none(), st.booleans(), st.integers()))
def test_durations_are_finite_and_not_negative(value: object) -> None:
    try:
        duration = parse_duration(value)
    except ValueError:
        return
    assert 0 <= duration < float("inf")


@pytest.mark.slow
@pytest.mark.parametrize(("text", "mode"), [("on", "on"), ("off", "off"), ("'off'", "off"), ("auto", "auto")])
def test_switches_are_what_they_say_whatever_yaml_makes_of_them(text: str, mode: str, tmp_path: Path) -> None:
    fleet = parse_fleet(f"cluster: {{gpus: 1, mps: {text}}}\nmodels: [{{name: a, hub: x/y}}]", "f", tmp_path, {})
    assert fleet.cluster.mps == mode
    jsonschema.validate(yaml.safe_load(f"cluster: {{mps: {text}}}\nmodels: [{{name: a, hub: x/y}}]"), fleet_schema())


def test_gpus_by_number_and_uuid(tmp_path: Path) -> None:
    uuid = "GPU-8f6d2b1c-0000-4000-8000-00000000000a"
    text = f"cluster: {{gpu_ids: [3, {uuid}], gpu_memory: 0.8, sm_sharing: green_contexts}}\n"
    text += "models: [{name: a, hub: x/y, engines: split, sm: {prefill: 0.6}}]"
    fleet = parse_fleet(text, "f", tmp_path, {})
    assert fleet.cluster.gpu_ids == [3, uuid]
    assert (fleet.cluster.gpu_memory, fleet.cluster.sm_sharing, fleet.cluster.ranks) == (0.8, "green_contexts", 1)
    assert (fleet.models[0].sm.prefill, fleet.models[0].sm.decode) == (0.6, None)
    jsonschema.validate(yaml.safe_load(text), fleet_schema())


def test_what_models_share_stands_in_a_place_of_its_own(tmp_path: Path) -> None:
    text = "x-small: &small {hub: x/y, max_num_seqs: 8}\nmodels:\n"
    text += "  - {<<: *small, name: a, aliases: [org/a, a:latest]}\n  - {<<: *small, name: b, max_num_seqs: 9}\n"
    fleet = parse_fleet(text, "f", tmp_path, {})
    assert [model.max_num_seqs for model in fleet.models] == [8, 9]
    assert fleet.models[0].aliases == ["org/a", "a:latest"]
    jsonschema.validate(yaml.safe_load(text), fleet_schema())


def test_names_that_several_models_share(tmp_path: Path) -> None:
    text = "aliases: {chat: {a: 90, b: 10}, old/name: a}\nmodels: [{name: a, hub: x/y}, {name: b, hub: x/y}]\n"
    fleet = parse_fleet(text, "f", tmp_path, {})
    assert fleet.aliases == {"chat": {"a": 90.0, "b": 10.0}, "old/name": {"a": 1.0}}
    jsonschema.validate(yaml.safe_load(text), fleet_schema())


def test_the_committed_schema_is_up_to_date() -> None:
    committed = (ROOT / "configs/fleet.schema.json").read_text()
    assert committed == fleet_schema_text(), "run: muxserve schema > configs/fleet.schema.json"


def test_the_schema_takes_what_we_take_and_refuses_what_we_refuse() -> None:
    validator = jsonschema.Draft202012Validator(fleet_schema())
    validator.check_schema(fleet_schema())
    for file in (ROOT / "configs").glob("*.yaml"):
        assert not list(validator.iter_errors(yaml.safe_load(file.read_text()))), file
    good = {"models": [{"name": "a", "hub": "x/y"}], "cluster": "auto", "kv_pool": {"size": "1GiB"}}
    assert validator.is_valid(good)
    assert validator.is_valid({**good, "cluster": {"cores": 2}, "gateway": {"drain_seconds": "5s", "api_keys": "k"}})
    for bad in (
        {**good, "models": []},
        {**good, "models": [{"name": "a"}]},
        {**good, "models": [{"name": "a", "hub": "x", "path": "y"}]},
        {**good, "polizy": "adbs"},
        {**good, "cluster": "many"},
        {**good, "kv_pool": {"size": "12XB"}},
        {**good, "models": [{"name": "a", "hub": "x", "rate": 0}]},
    ):
        assert not validator.is_valid(bad), bad


def test_the_quickstart_fleet_reads() -> None:
    fleet = load_fleet(ROOT / "configs/quickstart.yaml")
    assert [model.name for model in fleet.models] == ["arithmetic", "atlas", "frontdesk"]
    assert all(model.demo for model in fleet.models)


def test_importing_muxserve_loads_nothing_heavy() -> None:
    code = "import muxserve, sys, json; print(json.dumps(sorted(sys.modules)))"
    modules = set(json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)))
    assert not modules & {"pydantic", "yaml", "typer", "rich", "numpy", "zmq", "torch", "vllm"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "speed"),
    [("25Gb/s", 3.125e9), ("25 Gbit", 3.125e9), ("100Gbps", 12.5e9), ("3GB/s", 3e9), ("1.5 GiB/s", 1.5 * 2**30)],
)
def test_speeds_are_of_bits_or_of_bytes(text: str, speed: float) -> None:
    assert parse_speed(text) == speed
    fleet = parse_fleet(f"cluster: {{network: {text}}}\n{ONE}", "fleet.yaml", Path("/"), {})
    assert fleet.cluster.network == speed
    jsonschema.validate(yaml.safe_load(f"cluster: {{network: {text}}}\n{ONE}"), fleet_schema())


@pytest.mark.parametrize("value", [25, "25", "25G", "0Gb/s", "25gb/s", "-1Gb/s", "fast", True])
def test_a_speed_says_what_it_counts(value: object) -> None:
    with pytest.raises(ValueError, match=r"25Gb/s \(bits\) or 3GB/s \(bytes\)|larger than zero"):
        parse_speed(value)


def test_the_network_is_10_gigabits_unless_it_is_said() -> None:
    assert parse_fleet(ONE, "fleet.yaml", Path("/"), {}).cluster.network == parse_speed("10Gb/s")
    assert fleet_schema()["$defs"]["ClusterSection"]["properties"]["network"]["default"] == "10Gb/s"
