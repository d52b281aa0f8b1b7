"""Engines that rest while their model sleeps, and answer as before when it is woken: in one process each, and with two
ranks. vLLM computes; the unit scheduler and the controller are the test's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from muxserve.memory import server
from muxserve.wire import HeldRequests, ShowRequests
from tests.engine.checks import nothing_owned, workers
from tests.engine.conftest import SPLIT
from tests.engine.harness import Engines, deployed_model, engines
from tests.support.patience import until_ended

ROOT = Path(__file__).resolve().parents[2]
MODEL = SPLIT
PHASES = ("prefill", "decode")
# The last one of several chunks.
PROMPTS = [[5, 17, 42, 8], [99], list(range(3, 203))]
TOKENS = 12


def parent_of(unit: str, file: Path, log: Path, control: socket.socket) -> psutil.Process:
    command = [sys.executable, "-m", "tests.engine.resting_family", "--unit-spec", str(file), "--control-fd"]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, str(control.fileno())], cwd=ROOT, pass_fds=[control.fileno()], stdout=output, stderr=output
        )
    return psutil.Process(process.pid)


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.thorough)],
    ids=["one process", "two ranks"],
)
def family(request: pytest.FixtureRequest) -> Iterator[Engines]:
    model = deployed_model(MODEL, ROOT / "configs/models" / MODEL, ranks=request.param, max_num_batched_tokens=128)
    with engines([model], ranks=request.param, parent_of=parent_of) as running:
        yield running


def answers(family: Engines, name: str) -> list[list[int]]:
    """Tokens of some requests at a time."""
    requests = {
        f"{name}-{number}": family.body(f"{name}-{number}", prompt, max_tokens=TOKENS, ignore_eos=True)
        for number, prompt in enumerate(PROMPTS)
    }
    family.serve(MODEL, requests)
    return [family.tokens[each] for each in requests]


def wake(family: Engines) -> None:
    """Have both engines back."""
    hellos, before = len(family.hellos), dict(family.pids)
    for phase in PHASES:
        family.fork(MODEL, phase)
    family.expect_up({(MODEL, phase) for phase in PHASES})
    family.until(lambda: len(family.hellos) >= hellos + len(PHASES))
    assert family.pids == before, "they have stayed"


def test_engines_answer_as_before_they_rested(family: Engines) -> None:
    expected = answers(family, "before")
    assert [len(each) for each in expected] == [TOKENS] * len(PROMPTS)
    for rest in range(3):
        family.rest(MODEL, *PHASES)
        wake(family)
        assert answers(family, f"after-{rest}") == expected


def test_what_an_engine_has_when_it_is_told_to_rest_is_lost_to_it(family: Engines) -> None:
    expected = answers(family, "whole")
    body = family.body("struck", PROMPTS[0], max_tokens=900, ignore_eos=True)
    family.lease(f"{MODEL}/prefill", [family.admit("struck", body)])
    family.until(lambda: "struck" in family.held)
    held = family.held["struck"]
    adopted = family.admit(
        "struck", body, adopt=held.key, computed_tokens=held.computed_tokens, output_tokens=held.output_tokens
    )
    family.lease(f"{MODEL}/decode", [adopted])
    family.until(lambda: len(family.tokens["struck"]) > 3)
    family.rest(MODEL, *PHASES)
    nothing_owned(family)
    wake(family)
    family.send(f"{MODEL}/decode", ShowRequests())
    family.until(lambda: any(isinstance(each, HeldRequests) for _, each in family.reports))
    (said,) = (each for _, each in family.reports if isinstance(each, HeldRequests))
    assert said.request_ids == []
    assert answers(family, "again") == expected


def test_a_memory_manager_that_died_meanwhile_is_noticed(family: Engines) -> None:
    expected = answers(family, "old")
    family.rest(MODEL, *PHASES)
    os.kill(family.manager.pid, signal.SIGKILL)
    family.manager.wait()
    family.manager = server.start(family.unit_spec)
    lost = len(family.lost())
    wake(family)
    family.until(lambda: len(family.lost()) >= lost + len(PHASES))
    assert answers(family, "new") == expected


def test_an_engine_that_dies_at_rest_is_forked_anew(family: Engines) -> None:
    expected = answers(family, "first")
    family.rest(MODEL, *PHASES)
    before = family.pids[MODEL, "decode"]
    theirs = workers(before)
    family.kill(MODEL, "decode")
    family.expect_exit(before)
    hellos = len(family.hellos)
    for phase in PHASES:
        family.fork(MODEL, phase)
    family.expect_up({(MODEL, phase) for phase in PHASES})
    family.until(lambda: len(family.hellos) >= hellos + len(PHASES))
    assert family.pids[MODEL, "decode"] != before
    for worker in theirs:
        until_ended(worker, "a worker of the engine that died")
    assert answers(family, "last") == expected
