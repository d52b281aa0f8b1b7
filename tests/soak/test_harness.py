"""What the soak itself must be trusted with: its schedule, its judgement, its walls."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.fleet import ROOT
from tests.soak.load import (
    BROKEN,
    FAILED,
    FAULTS,
    LOST,
    REFUSED,
    REJECTED,
    RIGHT,
    UNREACHED,
    UNSHAPED,
    WRONG,
    Questions,
    Tally,
    judge_status,
    judged,
)
from tests.soak.parts import _KINDS, Part, how_many
from tests.soak.report import Step, again, by_kind, failures, table, totals
from tests.soak.schedule import KINDS, chosen, kind_of, possible, random_of
from tests.soak.topologies import TOPOLOGIES
from tests.support.patience import PATIENCE


def test_a_step_is_the_same_whenever_it_is_done() -> None:
    kinds = chosen("")
    steps = [kind_of(kinds, 7, "quickstart", step).name for step in range(2 * len(kinds))]
    # Also alone, and with kinds in another order.
    assert [kind_of(kinds[::-1], 7, "quickstart", step).name for step in range(2 * len(kinds))] == steps
    for deck in (steps[: len(kinds)], steps[len(kinds) :]):
        assert sorted(deck) == sorted(kind.name for kind in kinds)
    assert steps[: len(kinds)] != steps[len(kinds) :]
    assert steps != [kind_of(kinds, 8, "quickstart", step).name for step in range(2 * len(kinds))]
    assert random_of(7, "quickstart", 3).random() == random_of(7, "quickstart", 3).random()


def test_parts_are_told_by_modules_that_exist() -> None:
    alone = [each for pattern, _ in _KINDS for each in pattern.split("|")]
    modules = [each.replace("\\.", ".") for each in alone if each.startswith("muxserve\\.")]
    assert len(modules) >= 5
    for module in modules:
        assert importlib.util.find_spec(module), module


def test_parts_that_come_and_go_are_not_counted() -> None:
    topology = TOPOLOGIES["loading"]
    found = [Part(kind, kind, psutil.Process()) for kind in ("engine", "engine", "model parent", "gateway")]
    assert how_many(found, topology.changing) == Counter(gateway=1)
    assert how_many(found, TOPOLOGIES["quickstart"].changing)["engine"] == 2


def test_faults_are_chosen_by_group_and_name_and_only_where_they_are_possible() -> None:
    assert {kind.group for kind in chosen("cancels, disk")} == {"cancels", "disk"}
    assert [kind.name for kind in chosen("kills/engine")] == ["kills/engine"]
    with pytest.raises(ValueError, match="nothing; groups: cancels, "):
        chosen("nothing")
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    left = possible(chosen("kills"), Counter({"engine": 2}))
    assert {kind.needs for kind in left} == {"engine", None}


@pytest.mark.parametrize(
    ("status", "text", "outcome"),
    [
        (429, '{"error": {"message": "later", "type": "RateLimitError", "param": null, "code": 429}}', REFUSED),
        (400, '{"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}', REJECTED),
        (500, '{"error": {"message": "it raised", "type": "InternalServerError", "param": null, "code": 500}}', FAILED),
        (400, '{"error": {"message": "", "type": "BadRequestError", "param": null, "code": 400}}', UNSHAPED),
        (400, '{"detail": "no"}', UNSHAPED),
        (503, "Service Unavailable", UNSHAPED),
        (503, '{"error": {"message": "no", "type": "ServiceUnavailableError", "code": 500}}', UNSHAPED),
    ],
)
def test_answers_other_than_200(status: int, text: str, outcome: str) -> None:
    assert judge_status(status, text, {"retry-after": "2"})[0] == outcome
    if status == 429:
        assert judge_status(status, text, {})[0] == UNSHAPED


async def test_a_request_is_lost_unless_it_had_it_coming() -> None:
    tally = Tally()

    async def rejected() -> tuple[str, str]:
        return REJECTED, "400: no"

    async def hangs() -> tuple[str, str]:
        await asyncio.Event().wait()
        return RIGHT, ""

    async def breaks() -> tuple[str, str]:
        raise httpx.ReadError("broken")

    async def finds_nobody() -> tuple[str, str]:
        raise httpx.ConnectError("refused")

    assert await judged(tally, rejected, what="a good request") == LOST
    assert await judged(tally, rejected, what="a bad one", deserves=[REJECTED]) == REJECTED
    assert await judged(tally, hangs, what="a request", seconds=0.01) == LOST
    # Gateways that break streams may do no more than that.
    assert await judged(tally, hangs, what="a request", seconds=0.01, may_break=lambda: True) == LOST
    assert await judged(tally, breaks, what="a request") == LOST
    assert await judged(tally, breaks, what="a request", may_break=lambda: True) == BROKEN
    assert await judged(tally, finds_nobody, what="a request", may_break=lambda: True) == UNREACHED
    assert tally.counts == {LOST: 4, REJECTED: 1, BROKEN: 1, UNREACHED: 1}
    assert len(tally.faults) == 4
    assert "no end in time" in tally.faults[1]


def test_another_answer_than_the_reference_is_wrong() -> None:
    answer = {"text": "Paris.", "finish": "stop", "prompt_tokens": 9, "completion_tokens": 3}
    questions = Questions(["atlas"], {"atlas": [answer]})
    assert questions.judge("atlas", 0, dict(answer)) == (RIGHT, "")
    assert questions.judge("atlas", 0, {**answer, "completion_tokens": 4})[0] == WRONG


def test_the_report_counts_each_request_once_and_says_how_to_see_a_failure_again() -> None:
    steps = [Step("quickstart", 4, "kills/engine", "killed", recovery_seconds=0.5) for _ in range(3)]
    for step in steps:
        step.load.add(RIGHT)
    steps[0].own.add(WRONG, "another")
    steps[1].recovery_seconds = None
    steps[1].faults.append("not whole again")
    steps[2].recovery_seconds = 1.5
    kind = by_kind(steps)["kills/engine"]
    assert kind["tried"] == 3
    assert kind["steps_with_failures"] == 2
    assert kind["requests"] == 4
    assert kind["recovery_seconds"] == {"median": 1.0, "most": 1.5}
    assert kind["not_recovered"] == 1
    assert totals(steps) == {"requests": 4, "right": 3, **dict.fromkeys(FAULTS, 0), "wrong": 1}
    found = failures(steps, 9, "kills,disk")
    assert found["steps"] == 2
    assert found["shown"][0]["again"] == again(steps[0], 9, "kills,disk")
    assert "--seed 9 --only kills,disk --topologies quickstart --from-step 4 --steps 1" in again(
        steps[0], 9, "kills,disk"
    )
    assert table(by_kind(steps)).splitlines()[-1].startswith("| kills: engine | 3 | 4 | 3 |")


def test_what_happens_inside_stays_inside(tmp_path: Path) -> None:
    """Shared memory, network and processes are others there, and nothing of them is left."""
    inner = f"""
import json, os, pathlib, socket, subprocess
from tests.soak.confined import inside
place = inside()
pathlib.Path("/dev/shm/soak-test").write_bytes(bytes(4096))
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
orphan = subprocess.Popen(["setsid", "sleep", "3600"])
found = dict(
    interfaces=[name for _, name in socket.if_nameindex()],
    shared=os.listdir("/dev/shm"),
    run=os.environ["XDG_RUNTIME_DIR"] == str(place.run) and os.path.ismount(place.run),
    strangers=[process.pid for process in place.strangers()] == [orphan.pid],
    base=str(place.base),
)
pathlib.Path({str(tmp_path / "found")!r}).write_text(json.dumps(found))
raise SystemExit(7)
"""
    outer = f"""
import sys
from tests.soak.confined import ConfinedError, run
from tests.support.patience import PATIENCE
try:
    sys.exit(run([sys.executable, "-c", {inner!r}], 16))
except ConfinedError as error:
    print(error)
    sys.exit(77)
"""
    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run([sys.executable, "-c", outer], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 7, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert found["interfaces"] == ["lo"]
    assert found["shared"] == ["soak-test"]
    assert found["run"]
    assert found["strangers"]
    assert not Path(found["base"]).exists()
    assert not os.path.exists("/dev/shm/soak-test")
    left = [process for process in psutil.process_iter(["pid", "cmdline"]) if process.pid not in before]
    assert not [process for process in left if process.info["cmdline"] == ["sleep", "3600"]]
