"""Two gateways with tenants and batches over a fake unit: keys, budgets and batches over the deaths of gateways."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from muxserve.spec import BatchesSpec, BudgetSpec, FallbackSpec, TenantSpec
from tests.gateway.playing import play
from tests.gateway.rig import Rig, Running, unit_state
from tests.gateway.unit_specs import fleet_of, model
from tests.support.patience import PATIENCE, eventually
from tests.support.ports import free_port
from tests.support.tiny_checkpoint import tiny_checkpoint

COMPLETIONS = "/v1/completions"
OPERATOR = {"Authorization": "Bearer of-the-operator"}


class Gateways:
    """Two gateways of one fleet, which may die."""

    def __init__(self, rig: Rig, directory: Path) -> None:
        fleet = fleet_of(
            directory,
            [model("alpha", tiny_checkpoint()), model("beta", tiny_checkpoint())],
            unit="teams",
            port=free_port(),
            api_keys=["of-the-operator"],
            count=2,
            batches=BatchesSpec(str(directory / "batches")),
        )
        fleet = msgspec.structs.replace(
            fleet,
            tenants=(TenantSpec("team", ()), TenantSpec("poor", (), budgets=(BudgetSpec("day", 40, "alpha"),))),
            usage_file=str(directory / "usage.sqlite"),
            fallbacks={"alpha": FallbackSpec("beta")},
        )
        self.rig, self.fleet = rig, fleet
        self.running: list[Running] = [rig.start(fleet, index) for index in range(2)]
        self.idle()

    def idle(self) -> None:
        """Let the unit say that nothing waits and nobody is served."""
        first = self.running[0]
        state = unit_state(first.unit_spec, {})
        for each in state["models"].values():
            each.update(queued=0, decoding=0)
        mark = first.mark()
        first.tell_unit("state", state=state)
        first.wait("state_set", mark)

    def kill(self, index: int) -> None:
        """Kill a gateway, and start another one in its place."""
        os.kill(self.running[index].pid, signal.SIGKILL)
        assert self.running[index].exit_status() == -signal.SIGKILL
        self.running[index] = self.rig.start(self.fleet, index)

    def ask(self, method: str, path: str, headers: dict[str, str] = OPERATOR, **more: Any) -> httpx.Response:
        # A connection each, so that both gateways are asked.
        return httpx.request(method, f"{self.running[0].url}{path}", headers=headers, timeout=PATIENCE, **more)

    def new_key(self, tenant: str) -> tuple[str, dict[str, str]]:
        made = self.ask("POST", "/admin/keys", json={"tenant": tenant}).json()
        return made["id"], {"Authorization": f"Bearer {made['key']}"}

    def create(self, headers: dict[str, str], prompts: dict[str, str]) -> str:
        rows = [
            {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": {"model": "alpha", "prompt": prompt}}
            for name, prompt in prompts.items()
        ]
        text = "\n".join(json.dumps(row) for row in rows)
        form = {"files": {"file": ("in.jsonl", text)}, "data": {"purpose": "batch"}}
        file = self.ask("POST", "/v1/files", headers, **form).json()["id"]
        order = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = self.ask("POST", "/v1/batches", headers, json=order).json()
        assert batch["status"] == "validating", batch
        return str(batch["id"])

    def batch(self, name: str, headers: dict[str, str]) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v1/batches/{name}", headers).json()
        return found

    def output(self, batch: dict[str, Any], headers: dict[str, str]) -> dict[str, str]:
        text = self.ask("GET", f"/v1/files/{batch['output_file_id']}/content", headers).text
        rows = [json.loads(line) for line in text.splitlines()]
        found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
        assert len(found) == len(rows)
        return found


@pytest.fixture(scope="module")
def gateways(rig: Rig) -> Gateways:
    rig.ready()
    directory = rig.directory / "teams"
    directory.mkdir()
    return Gateways(rig, directory)


@pytest.fixture(autouse=True)
def _alive(gateways: Gateways) -> Iterator[None]:
    yield
    assert gateways.ask("GET", "/health").status_code == 200


def test_a_batch_goes_on_in_another_gateway_when_its_own_is_killed(gateways: Gateways) -> None:
    key, headers = gateways.new_key("team")
    mark = gateways.running[0].mark()
    prompts = {f"q{number}": play(f"answer {number}") for number in range(20)}
    name = gateways.create(headers, {**prompts, "held": play("held at first", hold=2)})
    gateways.running[0].wait("held", mark)
    eventually(lambda: gateways.batch(name, headers)["request_counts"]["completed"] == 20, "20 answers")
    # Whichever runs it: both are killed, one after the other.
    for index in range(2):
        gateways.kill(index)
    gateways.running[0].tell_unit("go")
    gateways.running[0].wait("held", mark)
    assert gateways.batch(name, headers)["status"] == "in_progress"

    def is_done() -> bool:
        gateways.running[0].tell_unit("go")  # what was asked again is held again
        return bool(gateways.batch(name, headers)["status"] == "completed")

    eventually(is_done, "a complete batch")
    batch = gateways.batch(name, headers)
    assert batch["request_counts"] == {"total": 21, "completed": 21, "failed": 0}
    found = gateways.output(batch, headers)
    assert found == {**{each: f"answer {each[1:]}" for each in prompts}, "held": "held at first"}
    # It counts for the key that made it.

    def is_counted() -> bool:
        rows = gateways.ask("GET", "/admin/usage?by=key&tenant=team").json()["data"]
        return any(row["key"] == key and row["requests"] for row in rows)

    eventually(is_counted, "usage of the batch")


def test_a_batch_waits_while_others_are_queued(gateways: Gateways) -> None:
    _, headers = gateways.new_key("team")
    first = gateways.running[0]
    mark = first.mark()
    first.tell_unit("state", state=unit_state(first.unit_spec, {}))  # something is queued
    first.wait("state_set", mark)
    name = gateways.create(headers, {"one": play("as soon as there is room")})
    eventually(lambda: gateways.batch(name, headers)["status"] == "in_progress", "a batch in progress")
    mark = first.mark()
    assert (
        gateways.ask("POST", COMPLETIONS, headers, json={"model": "alpha", "prompt": play("interactive")}).json()[
            "choices"
        ][0]["text"]
        == "interactive"
    )
    assert [each for each in first.events(mark, "submit") if "as soon as" in json.dumps(each)] == []
    assert gateways.batch(name, headers)["request_counts"]["completed"] == 0
    gateways.idle()
    eventually(lambda: gateways.batch(name, headers)["status"] == "completed", "a complete batch")


def test_a_revoked_key_opens_neither_gateway_and_ends_its_batches(gateways: Gateways) -> None:
    name, headers = gateways.new_key("team")
    mark = gateways.running[0].mark()
    batch = gateways.create(headers, {"one": play("held", hold=1)})
    gateways.running[0].wait("held", mark)
    assert gateways.ask("DELETE", f"/admin/keys/{name}").json()["status"] == "revoked"
    for _ in range(10):
        assert gateways.ask("GET", "/v1/models", headers).status_code == 401
    _, other = gateways.new_key("team")  # the batch is its tenant's
    eventually(lambda: gateways.batch(batch, other)["status"] == "cancelled", "a cancelled batch")
    gateways.running[0].tell_unit("go")


def test_a_budget_holds_in_both_gateways_and_over_their_deaths(gateways: Gateways) -> None:
    _, headers = gateways.new_key("poor")

    answers: list[int] = []

    def ask() -> httpx.Response:
        body = {"model": "alpha", "prompt": play("some words")}
        answer = gateways.ask("POST", COMPLETIONS, headers, json=body)
        if answer.status_code == 200:
            answers.append(answer.json()["usage"]["total_tokens"])
        return answer

    while (answer := ask()).status_code == 200:
        assert len(answers) < 20
    assert sum(answers) >= 40
    assert answer.json()["error"]["code"] == "insufficient_quota"
    assert "x-muxserve-fallback" not in answer.headers  # a budget is no reason for another model
    beside = {"model": "beta", "prompt": play("of another model")}
    assert gateways.ask("POST", COMPLETIONS, headers, json=beside).status_code == 200

    def is_known() -> bool:
        return all(ask().status_code == 429 for _ in range(10))

    def used() -> int:
        (budget,) = gateways.ask("GET", "/admin/usage?tenant=poor").json()["budgets"]
        return int(budget["used"])

    eventually(is_known, "a budget that both gateways know to be used up")
    # The other gateway may have let some in before it knew. What is used is written within a second.
    eventually(lambda: all(used() == sum(answers) for _ in range(10)), "usage that both gateways have written")
    for index in range(2):
        gateways.kill(index)
    assert is_known()
    assert used() == sum(answers)
    assert len(answers) <= 4
