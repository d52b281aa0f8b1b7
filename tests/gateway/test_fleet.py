"""A real gateway over several units."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from muxserve.replicas.priorities import Level
from muxserve.replicas.scaling import ScalingRules
from muxserve.spec import (
    FleetSpec,
    GatewaySpec,
    ModelSpec,
    TenantLimits,
    TenantSpec,
    UnitEntry,
    UnitSpec,
    followed_file,
    load_followed,
)
from tests.gateway.fake_scheduler import FakeScheduler, at, nowhere
from tests.gateway.playing import play
from tests.gateway.rig import Event, Rig, Running, unit_state
from tests.gateway.unit_specs import model, unit_spec
from tests.support.fresh_metrics import fresh_metrics
from tests.support.patience import PATIENCE, eventually
from tests.support.ports import free_port
from tests.support.tiny_checkpoint import tiny_checkpoint


def unit(directory: Path, name: str, models: list[ModelSpec]) -> UnitEntry:
    """A unit in a directory of its own."""
    (directory / name).mkdir(exist_ok=True)
    one = unit_spec(directory / name, models, unit=name)
    return UnitEntry(one, one.unit_address, one.migrator_address, [model.name for model in models])


def fleet_in(directory: Path, units: tuple[str, str] = ("x0", "x1"), count: int = 1) -> FleetSpec:
    """Model alpha in two units, and beta, of which there may be no replica."""
    alpha, beta = model("alpha", tiny_checkpoint()), model("beta", tiny_checkpoint())
    return FleetSpec(
        run_dir=str(directory),
        gateway=GatewaySpec("127.0.0.1", free_port(), ["plain", "vip", "batch"], count=count),
        models=[alpha, beta],
        units=[unit(directory, name, [alpha]) for name in units],
        scaling={"beta": ScalingRules(minimum=0, maximum=1)},
        levels=(Level("high", 2), Level("normal", 1), Level("low", -5)),
        key_levels={"vip": "high", "batch": "low"},
    )


@pytest.fixture(scope="module")
def fleet(rig: Rig, gateway: Running) -> Running:
    directory = rig.directory / "fleet"
    directory.mkdir()
    running = rig.start(fleet_in(directory))
    for entry in running.fleet.units:
        report(rig, entry.unit_spec)
    return running


@pytest.fixture(scope="module")
def http(fleet: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.url, headers={"Authorization": "Bearer plain"}, timeout=PATIENCE) as client:
        while client.get("/health").json()["status"] != "ok":
            pass
        yield client


def report(rig: Rig, one: UnitSpec) -> None:
    """Let a fake unit say that its engines are up."""
    mark = rig.unit.mark()
    rig.unit.send("state", unit=one.unit, state=unit_state(one, {}))
    rig.unit.wait("state_set", mark, lambda e: e["unit"] == one.unit)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def complete(http: httpx.Client, say: str, model: str = "alpha", **script: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"model": model, "prompt": play(say, **script), "max_tokens": 60})


def index_of(http: httpx.Client) -> int:
    """Which gateway the client's connection is to."""
    index = http.get("/fleet").json()["gateway"]["index"]
    assert isinstance(index, int)
    return index


def listeners(port: int) -> int:
    """How many sockets listen at that port of this machine."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def streamed(http: httpx.Client, say: str, **script: Any) -> str:
    body = {"model": "alpha", "prompt": play(say, **script), "max_tokens": 60, "stream": True}
    text = ""
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def submits(rig: Rig, mark: int, count: int) -> list[Event]:
    """What units were sent since `mark`: so many requests, and no more."""
    rig.unit.wait("submit", mark, lambda _: len(rig.unit.since(mark, "submit")) >= count)
    found = rig.unit.since(mark, "submit")
    assert len(found) == count
    return found


def value_in(text: str, line: str) -> float:
    found = [float(x.rsplit(" ", 1)[1]) for x in text.splitlines() if x.startswith(line + " ")]
    return found[0] if found else 0.0


def sample(http: httpx.Client, line: str) -> float:
    """It may be a second old."""
    return value_in(http.get("/metrics").text, line)


def sample_now(http: httpx.Client, line: str) -> float:
    return value_in(fresh_metrics(lambda: http.get("/metrics").text), line)


def reaches(http: httpx.Client, line: str, value: float) -> None:
    """Wait for that sample: the text is rendered once a second at most."""
    eventually(lambda: sample(http, line) == value, lambda: f"{line} is {value}, not {sample(http, line)}")


def scheduler_up(http: httpx.Client) -> bool:
    """Whether it is now; another one may have been a moment ago."""
    return "muxserve_scheduler_up 1.0" in fresh_metrics(lambda: http.get("/metrics").text)


# ------------------------------------------------------------ where requests go


def test_without_a_scheduler_requests_are_spread(rig: Rig, http: httpx.Client) -> None:
    mark = rig.unit.mark()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(complete, http, f"number {n}", hold=2) for n in range(4)]
        for n in range(4):
            rig.unit.wait("held", mark, lambda e, n=n: len(rig.unit.since(mark, "held")) > n)
        assert sorted(e["unit"] for e in submits(rig, mark, 4)) == ["x0", "x0", "x1", "x1"]
        for name in ("x0", "x1"):
            rig.unit.send("go", unit=name)
        assert sorted(said(answer.result(PATIENCE)) for answer in waiting) == [f"number {n}" for n in range(4)]


def test_the_scheduler_chooses(rig: Rig, fleet: Running, http: httpx.Client) -> None:
    mark = rig.unit.mark()
    with FakeScheduler(fleet.fleet.scheduler_address, at("x1")) as scheduler:
        eventually(lambda: scheduler_up(http), "the scheduler is up")
        for n in range(3):
            assert said(complete(http, f"to x1, {n}")) == f"to x1, {n}"
        assert http.get("/fleet").json()["scheduler"] == "up"
        place = scheduler.places[-1]
        assert (place.model, place.service.scheduling, place.service.execution) == ("alpha", "normal", "normal")
        assert place.demand == submits(rig, mark, 3)[-1]["prompt_tokens"] + 1
    assert [e["unit"] for e in submits(rig, mark, 3)] == ["x1"] * 3
    # It is gone, and nobody waits for it.
    eventually(lambda: http.get("/fleet").json()["scheduler"] != "up", "the scheduler is gone")
    assert said(complete(http, "still served")) == "still served"


def test_a_scheduler_that_hangs_is_not_waited_for(rig: Rig, fleet: Running, http: httpx.Client) -> None:
    with FakeScheduler(fleet.fleet.scheduler_address, lambda _: None) as scheduler:
        eventually(lambda: scheduler_up(http), "the scheduler is up")
        answer = complete(http, "without it")
        assert said(answer) == "without it"
        assert answer.elapsed.total_seconds() >= 0.25
        assert scheduler.places
        assert http.get("/fleet").json()["scheduler"] == "down"


@pytest.mark.parametrize(("late", "status"), [(True, 503), (False, 400)])
def test_there_may_be_no_replica(fleet: Running, http: httpx.Client, late: bool, status: int) -> None:
    with FakeScheduler(fleet.fleet.scheduler_address, nowhere(late)):
        answer = complete(http, "asleep", model="beta")
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "nobody can serve this"
    assert ("retry-after" in answer.headers) is late


def test_a_request_wakes_its_model(rig: Rig, fleet: Running, http: httpx.Client) -> None:
    before = fleet.fleet
    assert http.get("/health").json()["models"]["beta"]["status"] == "asleep"
    mark = rig.unit.mark()
    with ThreadPoolExecutor(1) as pool, FakeScheduler(before.scheduler_address, lambda _: None) as scheduler:
        asked = pool.submit(complete, http, "good morning", model="beta")
        eventually(lambda: bool(scheduler.places), "the scheduler was asked")
        reaches(http, 'muxserve_gateway_requests_unplaced{model_name="beta"}', 1)
        woken = unit(Path(before.run_dir), "x2", [before.models[1]])
        fleet.change(msgspec.structs.replace(before, units=[*before.units, woken], generation=1))
        rig.unit.wait("hello", mark, lambda e: e["unit"] == "x2")
        # The next who asks may tell that the scheduler hangs.
        assert said(complete(http, "next", model="alpha")) == "next"
        assert said(asked.result(PATIENCE)) == "good morning"
    assert [e["unit"] for e in submits(rig, mark, 2) if e["model"] == "beta"] == ["x2"]
    fleet.change(msgspec.structs.replace(before, generation=2))
    eventually(lambda: len(http.get("/fleet").json()["units"]) == 2, "two units again")


# ------------------------------------------------------------ moves and deaths


def test_a_stream_moves(rig: Rig, http: httpx.Client) -> None:
    mark = rig.unit.mark()
    moved = 'muxserve_migrations_total{destination="x1",model_name="alpha",source="x0"}'
    before = sample_now(http, moved)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed, http, "from there to here", move=[4, "x1"], hold=7)
        assert rig.unit.wait("submit", mark)["unit"] == "x0"
        assert rig.unit.wait("held", mark)["unit"] == "x1"
        while sample(http, moved) == before:
            pass
        units = {unit["name"]: unit["requests_in_flight"] for unit in http.get("/fleet").json()["units"]}
        assert units == {"x0": 0, "x1": 1}
        rig.unit.send("go", unit="x1")
        assert stream.result(PATIENCE) == "from there to here"
    reaches(http, moved, before + 1)
    submits(rig, mark, 1)


def test_a_dead_unit_s_stream_goes_on_elsewhere(rig: Rig, fleet: Running, http: httpx.Client) -> None:
    mark = rig.unit.mark()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed, http, "it outlives its unit", hold=5)
        first = rig.unit.wait("submit", mark)
        rig.unit.wait("held", mark)
        rig.unit.send("down", unit=first["unit"])
        second = rig.unit.wait("submit", mark, lambda e: e["attempt"] == 1)
        assert {first["unit"], second["unit"]} == {"x0", "x1"}
        # The news of the death may overtake the last tokens.
        assert len(second["output_tokens"]) <= 5
        rig.unit.send("go", unit=second["unit"])
        assert stream.result(PATIENCE) == "it outlives its unit"
    health = http.get("/health").json()
    while health["status"] != "degraded":
        health = http.get("/health").json()
    assert health["models"]["alpha"]["status"] == "up"
    assert health["models"]["alpha"]["replicas"][first["unit"]] == "down"
    reaches(http, 'muxserve_replicas{model_name="alpha"}', 1)
    reaches(http, f'muxserve_unit_up{{unit="{first["unit"]}"}}', 0)
    mark = rig.unit.mark()
    rig.unit.send("restart", unit=first["unit"])
    rig.unit.wait("hello", mark, lambda e: e["unit"] == first["unit"])
    while http.get("/health").json()["status"] != "ok":
        pass


def test_a_drained_unit_s_requests_go_elsewhere(rig: Rig, http: httpx.Client) -> None:
    mark = rig.unit.mark()
    assert said(complete(http, "try the other", drain=True)) == "try the other"
    first, second = submits(rig, mark, 2)
    assert {first["unit"], second["unit"]} == {"x0", "x1"}
    assert (first["attempt"], second["attempt"]) == (0, 1)


# ------------------------------------------------------------ priorities


@pytest.mark.parametrize(
    ("key", "headers", "scheduling", "execution", "steps"),
    [
        ("plain", {}, "normal", "normal", (0, 0)),
        ("vip", {}, "high", "high", (-1, -1)),
        ("batch", {}, "low", "low", (1, 1)),
        ("plain", {"X-MuxServe-Priority": "high"}, "high", "high", (-1, -1)),
        ("plain", {"X-MuxServe-Scheduling-Priority": "high"}, "high", "normal", (-1, 0)),
        ("vip", {"X-MuxServe-Execution-Priority": "low"}, "high", "low", (-1, 1)),
        ("vip", {"X-MuxServe-Priority": "low", "X-MuxServe-Execution-Priority": "high"}, "low", "high", (1, -1)),
    ],
)
def test_levels(
    rig: Rig,
    http: httpx.Client,
    key: str,
    headers: dict[str, str],
    scheduling: str,
    execution: str,
    steps: tuple[int, int],
) -> None:
    mark = rig.unit.mark()
    body = {"model": "alpha", "prompt": play("in order"), "priority": 7}
    answer = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}", **headers})
    assert said(answer) == "in order"
    (submit,) = submits(rig, mark, 1)
    assert (submit["scheduling"], submit["execution"]) == (scheduling, execution)
    assert (submit["priority"], submit["body_priority"]) == (steps[0] * 2**32 + 7, steps[1] * 2**32 + 7)


@pytest.mark.parametrize(
    ("key", "level", "status", "words"),
    [
        ("plain", "urgent", 400, "no priority level 'urgent'; this server has high, normal, low"),
        ("plain", "", 400, "no priority level ''"),
        ("batch", "normal", 403, "this API key may ask for priority 'low' and below"),
    ],
)
def test_levels_that_cannot_be_had(http: httpx.Client, key: str, level: str, status: int, words: str) -> None:
    headers = {"Authorization": f"Bearer {key}", "X-MuxServe-Scheduling-Priority": level}
    answer = http.post("/v1/completions", json={"model": "alpha", "prompt": "x"}, headers=headers)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


# ------------------------------------------------------------ changes


def until_followed(fleet: Running, generation: int, model: str = "") -> None:
    """Until the gateway has written that it goes by the fleet's file of that generation, and offers `model`."""

    def there() -> bool:
        followed = load_followed(followed_file(fleet.fleet.run_dir, 0))
        return followed is not None and followed.generation >= generation and (not model or model in followed.offers)

    eventually(there, f"a gateway that follows generation {generation}")


def test_models_come_and_go_while_others_serve(rig: Rig, fleet: Running, http: httpx.Client) -> None:
    before = fleet.fleet
    gamma = model("gamma", tiny_checkpoint("qwen3", 2, 4, 2, 128, 1))
    added = unit(Path(before.run_dir), "x3", [gamma])
    mark = rig.unit.mark()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(streamed, http, "nobody disturbs this", hold=5)
        held = rig.unit.wait("held", mark)
        fleet.change(
            msgspec.structs.replace(before, models=[*before.models, gamma], units=[*before.units, added], generation=10)
        )
        until_followed(fleet, 10, "gamma")
        assert "gamma" in [card["id"] for card in http.get("/v1/models").json()["data"]]
        assert said(complete(http, "hello", model="gamma")) == "hello"
        # Removed, with one request under way.
        mark = rig.unit.mark()
        last = pool.submit(complete, http, "the last of gamma", model="gamma", hold=3)
        rig.unit.wait("held", mark)
        fleet.change(msgspec.structs.replace(before, units=[*before.units, added], generation=11))
        until_followed(fleet, 11)
        late = complete(http, "too late", model="gamma")
        assert late.status_code == 404
        assert late.json()["error"]["type"] == "NotFoundError"
        rig.unit.send("go", unit="x3")
        assert said(last.result(PATIENCE)) == "the last of gamma"
        fleet.change(msgspec.structs.replace(before, generation=12))
        until_followed(fleet, 12)
        assert http.get("/fleet").json()["gateway"]["generation"] == 12
        rig.unit.send("go", unit=held["unit"])
        assert running.result(PATIENCE) == "nobody disturbs this"
    while any(
        line.startswith("vllm:") and 'model_name="gamma"' in line for line in http.get("/metrics").text.splitlines()
    ):
        pass
    # Under its old name, as something else.
    again = msgspec.structs.replace(gamma, path=str(tiny_checkpoint()))
    added = unit(Path(before.run_dir), "x4", [again])
    fleet.change(
        msgspec.structs.replace(before, models=[*before.models, again], units=[*before.units, added], generation=13)
    )
    until_followed(fleet, 13, "gamma")
    assert said(complete(http, "reborn", model="gamma")) == "reborn"
    fleet.change(msgspec.structs.replace(before, generation=14))
    while http.get("/fleet").json()["gateway"]["generation"] != 14:
        pass


@pytest.mark.thorough
def test_forty_models_that_come_and_go_leave_no_memory(rig: Rig, fleet: Running, http: httpx.Client) -> None:
    """Each in a unit of its own, asked, scraped, and removed with its unit; the process grows by nothing for each."""
    before = fleet.fleet
    process = psutil.Process(fleet.pid)
    used: list[int] = []
    for number in range(40):
        name, generation = f"passing-{number}", 100 + 2 * number
        passing = model(name, tiny_checkpoint())
        added = unit(Path(before.run_dir), f"p{number}", [passing])
        models, units = [*before.models, passing], [*before.units, added]
        fleet.change(msgspec.structs.replace(before, models=models, units=units, generation=generation))
        until_followed(fleet, generation, name)
        assert said(complete(http, "hello", model=name)) == "hello"
        asked = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=asked).status_code == 200
        for path in (f"/models/{name}/metrics", "/metrics/full", "/fleet", "/health"):
            assert http.get(path).status_code == 200
        fleet.change(msgspec.structs.replace(before, generation=generation + 1))
        until_followed(fleet, generation + 1)
        eventually(lambda gone=f"{name} is not offered any more": gone in fleet.log, f"{name} has left")
        mark = rig.unit.mark()
        rig.unit.send("down", unit=f"p{number}")
        rig.unit.wait("down", mark)
        used.append(process.memory_full_info().uss)
    # The first rounds fill what is bounded. A model's front end has some megabytes.
    settled = np.array(used[10:], dtype=float)
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0])
    assert slope < 50_000, f"{slope:,.0f} bytes for each model: {[each >> 10 for each in used]} KiB"


def test_a_model_that_changes_holds_up_nothing_else(rig: Rig, fleet: Running, http: httpx.Client) -> None:
    """Its last requests may take long, and so may others': new keys count at once, and models come meanwhile."""
    before = fleet.fleet
    mark = rig.unit.mark()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(streamed, http, "to its end as it was", hold=5)
        held = rig.unit.wait("held", mark)
        alpha = msgspec.structs.replace(before.models[0], engine_args={"max_logprobs": 7})
        gamma = model("gamma", tiny_checkpoint())
        broken = msgspec.structs.replace(model("broken"), path=before.run_dir)  # there is no checkpoint
        added = unit(Path(before.run_dir), "x6", [gamma])
        gateway = msgspec.structs.replace(before.gateway, api_keys=["plain", "another"])
        changed = msgspec.structs.replace(
            before,
            gateway=gateway,
            models=[alpha, broken, before.models[1], gamma],
            units=[*before.units, added],
            key_levels={},
            generation=40,
        )
        fleet.change(changed)
        while http.get("/fleet", headers={"Authorization": "Bearer another"}).status_code != 200:
            assert http.get("/health").status_code == 200
        assert http.get("/fleet", headers={"Authorization": "Bearer vip"}).status_code == 401
        while complete(http, "meanwhile", model="gamma").status_code in (404, 503):
            assert set(http.get("/health").json()["models"]) == {"alpha", "broken", "beta", "gamma"}
        assert said(complete(http, "meanwhile", model="gamma")) == "meanwhile"
        not_yet = complete(http, "not yet")
        assert (not_yet.status_code, not_yet.headers["retry-after"]) == (503, "2")
        assert complete(http, "never", model="broken").status_code == 503
        assert "broken cannot be offered" in fleet.log
        rig.unit.send("go", unit=held["unit"])
        assert running.result(PATIENCE) == "to its end as it was"
    while complete(http, "as it is now").status_code == 503:
        pass
    asking = {"model": "alpha", "prompt": play("x"), "max_tokens": 1, "logprobs": 9}
    assert http.post("/v1/completions", json=asking).status_code == 400
    fleet.change(msgspec.structs.replace(before, generation=41))
    while complete(http, "as before").status_code != 200 or "gamma" in http.get("/health").json()["models"]:
        pass
    while http.post("/v1/completions", json={**asking, "logprobs": 8}).status_code != 200:
        pass


def test_keys_levels_and_limits_change(fleet: Running, http: httpx.Client) -> None:
    before = fleet.fleet
    gateway = msgspec.structs.replace(before.gateway, api_keys=["plain", "another"])
    models = [msgspec.structs.replace(one, max_concurrency=5, max_queue=3, max_wait=2.0) for one in before.models]
    fleet.change(msgspec.structs.replace(before, gateway=gateway, models=models, key_levels={}, generation=20))
    while http.get("/fleet", headers={"Authorization": "Bearer another"}).status_code != 200:
        pass
    assert http.get("/fleet", headers={"Authorization": "Bearer vip"}).status_code == 401
    shown = http.get("/fleet").json()["models"][0]
    assert shown["limits"] == {"max_concurrency": 5, "max_queue": 3, "max_wait_seconds": 2.0}
    fleet.change(msgspec.structs.replace(before, generation=21))
    while http.get("/fleet", headers={"Authorization": "Bearer vip"}).status_code != 200:
        pass


def test_tenants_come_and_go(rig: Rig, fleet: Running, http: httpx.Client, tmp_path: Path) -> None:
    """Their limits hold, and what they use is what the client is told, down to cached tokens."""
    before = fleet.fleet
    team = TenantSpec(
        "team",
        (sha256(b"of-the-team").hexdigest(),),
        ("alpha",),
        "low",
        TenantLimits(tokens_per_minute=600),
        weight=2.0,
    )
    usage_file = str(tmp_path / "usage.sqlite")
    fleet.change(msgspec.structs.replace(before, tenants=(team,), usage_file=usage_file, generation=22))
    key = {"Authorization": "Bearer of-the-team"}
    while http.get("/v1/models", headers=key).status_code != 200:
        pass
    assert [card["id"] for card in http.get("/v1/models", headers=key).json()["data"]] == ["alpha"]
    body = {"model": "alpha", "prompt": play("some words"), "max_tokens": 60, "n": 2}
    mark = rig.unit.mark()
    answer = http.post("/v1/completions", json=body, headers=key)
    assert answer.status_code == 200, answer.text
    assert [(each["tenant"], each["weight"]) for each in submits(rig, mark, 2)] == [("team", 2.0)] * 2
    usage = answer.json()["usage"]
    spent = usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer.headers["x-ratelimit-limit-tokens"] == "600"
    # The bucket fills up again meanwhile.
    assert 600 - spent <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 600
    with http.stream("POST", "/v1/completions", json={**body, "n": 1, "stream": True}, headers=key) as stream:
        assert int(stream.headers["x-ratelimit-remaining-tokens"]) <= 600
        stream.read()
    assert http.post("/v1/completions", json={**body, "model": "beta"}, headers=key).status_code == 404
    rows = http.get("/admin/usage").json()["data"]
    (row,) = [row for row in rows if row["tenant"] == "team"]
    assert (row["model"], row["requests"], row["cached_tokens"]) == ("alpha", 2, 2)
    assert row["prompt_tokens"] == 2 * usage["prompt_tokens"]
    assert row["output_tokens"] == usage["completion_tokens"] * 3 // 2
    total = 'muxserve_tenant_tokens_total{kind="output",model_name="alpha",tenant="team"}'
    reaches(http, total, row["output_tokens"])
    fleet.change(msgspec.structs.replace(before, generation=23))
    while http.get("/v1/models", headers=key).status_code != 401:
        pass


def test_a_file_that_cannot_be_read_changes_nothing(fleet: Running, http: httpx.Client) -> None:
    before = fleet.fleet
    before.file.write_text("{")
    errors = fleet.log.count("cannot be read, so nothing changes")
    fleet.signal()
    while fleet.log.count("cannot be read, so nothing changes") == errors:
        pass
    assert said(complete(http, "as before")) == "as before"
    fleet.change(before)


# ------------------------------------------------------------ what is told


def test_the_fleet_as_data(http: httpx.Client) -> None:
    fleet = http.get("/fleet").json()
    first, second = fleet["units"]
    assert (first["name"], first["status"], first["remote"], first["serves"]) == ("x0", "up", False, ["alpha"])
    assert second["state"]["models"]["alpha"]["used_pages"] == 12
    assert [m["replicas"] for m in fleet["models"]] == [["x0", "x1"], []]
    assert [m["status"] for m in fleet["models"]] == ["up", "asleep"]
    assert [level["name"] for level in fleet["levels"]] == ["high", "normal", "low"]


def test_metrics_by_unit(http: httpx.Client) -> None:
    reaches(http, 'muxserve_pages_used{model_name="alpha",unit="x1"}', 12)
    reaches(http, 'muxserve_engine_up{model_name="alpha",phase="decode",unit="x0"}', 1)
    reaches(http, 'muxserve_replicas{model_name="alpha"}', 2)
    reaches(http, 'muxserve_replicas{model_name="beta"}', 0)


def test_a_model_with_one_engine_of_both_phases(rig: Rig, fleet: Running, http: httpx.Client) -> None:
    before = fleet.fleet
    delta = model("delta", tiny_checkpoint(), shape="one", stages=2)
    added = unit(Path(before.run_dir), "x5", [delta])
    piped = msgspec.structs.replace(added.unit_spec, policy="free", ranks=2)
    added = msgspec.structs.replace(added, unit_spec=piped)
    fleet.change(
        msgspec.structs.replace(before, models=[*before.models, delta], units=[*before.units, added], generation=30)
    )
    while complete(http, "one engine", model="delta").status_code in (404, 503):
        pass
    assert http.get("/health").json()["models"]["delta"]["engines"] == {"both": "down"}
    assert http.get("/health").json()["models"]["alpha"]["engines"] == {"prefill": "up", "decode": "up"}
    report(rig, added.unit_spec)
    reaches(http, 'muxserve_replicas{model_name="delta"}', 1)
    assert said(complete(http, "one engine", model="delta")) == "one engine"
    shown = http.get("/fleet").json()
    assert [m["shape"] for m in shown["models"]] == ["split", "split", "one"]
    assert [(u["ranks"], u["stages"]) for u in shown["units"]] == [(1, 1), (1, 1), (2, 2)]
    lines = fresh_metrics(lambda: http.get("/metrics").text).splitlines()
    of_delta = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if 'model_name="delta"' in line}
    assert of_delta['muxserve_engine_up{model_name="delta",phase="both",unit="x5"}'] == 1
    assert of_delta['muxserve_jobs_total{model_name="delta",phase="both",unit="x5"}'] == 7
    assert of_delta['muxserve_stage_bubble_seconds_total{model_name="delta",stage="0",unit="x5"}'] == 0.25
    assert of_delta['muxserve_stage_bubble_seconds_total{model_name="delta",stage="1",unit="x5"}'] == 1.5
    assert of_delta['muxserve_phase_switches_total{model_name="delta",unit="x5"}'] == 5
    assert of_delta['muxserve_phase_switch_seconds_total{model_name="delta",unit="x5"}'] == 0.75
    # vLLM's own metrics know one engine, too.
    assert of_delta['vllm:prompt_tokens_total{model_name="delta"}'] > 0
    assert 'vllm:prompt_tokens_total{engine="1",model_name="delta"}' in http.get("/metrics/full").text
    assert not [name for name in of_delta if 'phase="prefill"' in name]
    fleet.change(msgspec.structs.replace(before, generation=31))
    while http.get("/fleet").json()["gateway"]["generation"] != 31:
        pass


# ------------------------------------------------------------ several gateways


def test_two_gateways_at_one_address(rig: Rig, gateway: Running) -> None:
    directory = rig.directory / "pair"
    directory.mkdir()
    fleet = fleet_in(directory, ("y0", "y1"), count=2)
    pair = [rig.start(fleet, index) for index in range(2)]
    asked = [0, 0]
    while not all(asked):
        with httpx.Client(base_url=pair[0].url, headers={"Authorization": "Bearer plain"}, timeout=PATIENCE) as http:
            about = http.get("/fleet").json()["gateway"]
            assert about["count"] == 2
            assert said(complete(http, f"by {about['index']}")) == f"by {about['index']}"
            asked[about["index"]] += 1
    # Whoever is asked tells the metrics of both.
    with httpx.Client(base_url=pair[0].url, headers={"Authorization": "Bearer plain"}, timeout=PATIENCE) as http:
        served = 'muxserve_requests_total{gateway="%d",model_name="alpha",outcome="completed"}'
        for index, count in enumerate(asked):
            reaches(http, served % index, count)
        text = http.get("/metrics").text
        assert text.count("# TYPE muxserve_requests_total ") == text.count("# TYPE muxserve_unit_up ") == 1
        assert sample(http, 'muxserve_pages_quota{model_name="alpha",unit="y0"}') == 0  # they have not said
        assert 'muxserve_unit_up{unit="y0"}' in text
        assert 'process_open_fds{gateway="1"}' in text
        list(text_string_to_metric_families(text))
        # A picker wants one figure per model.
        of_both = 'muxserve_requests_total{model_name="alpha",outcome="completed"}'
        assert value_in(http.get("/models/alpha/metrics").text, of_both) == sum(asked)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:

        def client() -> httpx.Client:
            headers = {"Authorization": "Bearer plain"}
            return stack.enter_context(httpx.Client(base_url=pair[0].url, headers=headers, timeout=PATIENCE))

        to_first: list[httpx.Client] = []
        while len(to_first) < 2:
            http = client()
            if index_of(http) == 0:
                to_first.append(http)
        mark = rig.unit.mark()
        running = pool.submit(complete, to_first[0], "to the end", hold=2)
        unit = rig.unit.wait("held", mark)["unit"]
        pair[0].terminate()
        while listeners(fleet.gateway.port) > 1:
            pass
        # It still serves, but all who come go to the other one, and who is there goes with the next answer.
        assert [index_of(client()) for _ in range(8)] == [1] * 8
        last = complete(to_first[1], "goes on")
        assert (said(last), last.headers["connection"]) == ("goes on", "close")
        assert index_of(to_first[1]) == 1
        rig.unit.send("go", unit=unit)
        assert said(running.result(PATIENCE)) == "to the end"
        assert pair[0].exit_status() == 0
        while 'gateway="0"' in client().get("/metrics").text:
            pass
    pair[1].terminate()
    assert pair[1].exit_status() == 0
