"""Engines of both phases over two stages on CPU, one worker process and one pool per stage; one page table."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from muxserve.memory import server
from muxserve.wire import Detach, Detached
from tests.engine.checks import bodies, check, nothing_owned, reports, workers
from tests.engine.harness import MODELS, Engines, deployed_model, engines
from tests.support.patience import until_ended
from tests.support.thoroughness import cases

MODEL = "arithmetic"
# The same model twice.
ONE, OTHER = "one", "other"
BLOCK = 64


# A machine that does other things may be too slow to meet an engine in the middle of something.
TRIES = 10


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    models = [
        deployed_model(name, MODELS[MODEL], layers=2, max_num_batched_tokens=128, shape="one") for name in (ONE, OTHER)
    ]
    with engines(models, ranks=2, stages=2) as running:
        yield running


def decoding(family: Engines, model: str, requests: dict[str, bytes]) -> dict[str, int]:
    """Prefill them, and no more. Returns their incarnations."""
    admits = [family.admit(name, body) for name, body in requests.items()]
    family.lease(f"{model}/both", admits, phase="prefill")
    family.until(lambda: all(name in family.prefilled for name in requests))
    return {admit.request_id: admit.incarnation for admit in admits}


def equal(family: Engines, tag: str, answers: dict[str, Any], count: int, tokens: int) -> dict[str, bytes]:
    prompt = answers["greedy"]["prompt"]
    return {f"{tag}-{i}": family.body(f"{tag}-{i}", prompt, max_tokens=tokens, ignore_eos=True) for i in range(count)}


@pytest.mark.parametrize("mixed", cases([True, False], [True]))
def test_tokens_are_those_of_one_stage(family: Engines, answers: dict[str, Any], mixed: bool) -> None:
    since = len(family.reports)
    for again in range(2):
        tag = f"{mixed}-{again}"
        family.serve_both(ONE, bodies(family, answers, tag), mixed)
        check(family, answers, tag)
    nothing_owned(family)
    # Each stage waits for the other now and then, and says for how long.
    bubbles = [report.bubbles for report in reports(family, since)]
    assert {len(each) for each in bubbles} == {2}
    assert all(sum(stage) > 0 for stage in zip(*bubbles, strict=True))


def test_each_stage_writes_its_own_pool_at_the_same_pages(family: Engines, answers: dict[str, Any]) -> None:
    with family.memory() as client:
        client.reset_cache(client.map(OTHER))
        views = [client.map(OTHER, rank) for rank in range(2)]
        for view in views:
            view.pool[:] = 0
        incarnation = decoding(family, OTHER, {"pages": family.body("pages", answers["greedy"]["prompt"])})["pages"]
        family.ask(f"{OTHER}/both", Detach("pages", incarnation, "pages", 0), Detached)
        blocks = client.adopt(views[0], "pages")
        pages = views[0].page_table[blocks].reshape(-1)
        assert len(set(pages.tolist())) == blocks.size * 2 * 4
        for view in views:
            written = set(np.flatnonzero(view.pool.any(axis=1)).tolist())
            assert set(pages.tolist()) <= written
            assert written <= {0, *pages.tolist()}
        assert not np.array_equal(views[0].pool[pages], views[1].pool[pages])
    nothing_owned(family)


def test_a_throttled_pipeline_decodes_half_of_the_sequences_in_each_micro_batch(
    family: Engines, answers: dict[str, Any]
) -> None:
    requests = equal(family, "half", answers, 8, 60)
    decoding(family, ONE, requests)
    lease = family.lease(f"{ONE}/both", steps=20)
    # A message that is answered at once, after what was in flight has come out: no further step came.
    family.until(lambda: any(r.lease_left == 0 for r in reports(family, lease=lease)))
    family.abort(f"{ONE}/both", ["half-0"])
    family.until(lambda: any("half-0" in r.finished for r in reports(family, lease=lease)))
    family.until(lambda: sum(len(family.tokens[name]) for name in requests) == 8 + 20 * 4)
    told = reports(family, lease=lease)
    assert (sum(r.steps for r in told), sum(r.tokens for r in told)) == (20, 80)
    assert {len(family.tokens[name]) for name in requests} == {11}
    family.lease(f"{ONE}/both")
    rest = list(requests)[1:]
    family.until(lambda: all(family.finished(name) for name in rest))
    assert len({tuple(family.tokens[name]) for name in rest}) == 1
    assert family.tokens[rest[0]][:40] == answers["greedy"]["tokens"]
    nothing_owned(family)


def test_prompts_come_in_chunks_of_the_budget(family: Engines, answers: dict[str, Any]) -> None:
    prompt = answers["chunked"]["prompt"]
    family.forget_prefixes(ONE)
    body = family.body("chunks", prompt, max_tokens=1)
    since = len(family.reports)
    family.lease(f"{ONE}/both", [family.admit("chunks", body)])
    family.until(lambda: family.finished("chunks"))
    chunks = [r.prefill_tokens for r in reports(family, since) if r.prefill_tokens]
    left, expected = len(prompt), []
    while left:
        # Eq. 3 with nothing else in the engine: an eighth of what waits, and at least 32 tokens.
        expected.append(min(left, max(left // 8, 32)))
        left -= expected[-1]
    assert chunks == expected
    family.until(lambda: any("chunks" in r.finished for r in reports(family, since)))


@pytest.mark.thorough
def test_requests_let_go_of_in_flight_go_on_elsewhere(family: Engines, answers: dict[str, Any]) -> None:
    for number in range(TRIES):
        requests = equal(family, f"leaves-{number}", answers, 4, 300)
        leaving = next(iter(requests))
        incarnation = decoding(family, ONE, requests)[leaving]
        family.lease(f"{ONE}/both", steps=100_000)
        family.until(lambda name=leaving: len(family.tokens[name]) > 10)
        left = family.ask(f"{ONE}/both", Detach(leaving, incarnation, leaving, 0), Detached)
        if left.key:
            break
        # On a busy machine it may have ended before.
        family.until(lambda requests=requests: all(family.finished(name) for name in requests))
    assert left.computed_tokens == len(answers["greedy"]["prompt"]) + len(left.output_tokens) - 1
    family.until(lambda: family.tokens[leaving] == left.output_tokens)
    admit = family.adopt(leaving, requests[leaving], left, foreign=True)
    family.lease(f"{ONE}/both", [admit], steps=100_000)
    family.until(lambda: all(family.finished(name) for name in requests))
    assert len({tuple(family.tokens[name]) for name in requests}) == 1
    nothing_owned(family)


@pytest.mark.parametrize("moment", cases([0, 1, 8], [0, 8]))
def test_abort_in_flight(family: Engines, answers: dict[str, Any], moment: int) -> None:
    tag = f"abort-{moment}"
    requests = equal(family, tag, answers, 5, 400)
    family.lease(f"{ONE}/both", [family.admit(name, body) for name, body in requests.items()])
    family.until(lambda: len(family.tokens[f"{tag}-0"]) >= moment)
    family.abort(f"{ONE}/both", list(requests))
    nothing_owned(family)
    family.serve_both(ONE, bodies(family, answers, f"after-{tag}", ["greedy", "chunked"]), mixed=True)
    check(family, answers, f"after-{tag}", ["greedy", "chunked"])


@pytest.mark.thorough
def test_preempted_requests_come_back_and_end_with_the_same_tokens(family: Engines, answers: dict[str, Any]) -> None:
    requests = equal(family, "tight", answers, 6, 160)
    requests |= bodies(family, answers, "tight", ["chunked", "seed"])
    before = len(family.returned())
    with family.quota(OTHER, blocks=11):
        family.serve_both(OTHER, requests, mixed=True)
    assert len(family.returned()) > before, "the quota was not tight enough to preempt anything"
    assert len({tuple(family.tokens[f"tight-{i}"]) for i in range(6)}) == 1
    check(family, answers, "tight", ["chunked", "seed"])
    nothing_owned(family)


def test_an_engine_goes_down_with_a_stage_and_comes_back(family: Engines, answers: dict[str, Any]) -> None:
    requests = equal(family, "stage", answers, 4, 900)
    family.lease(f"{OTHER}/both", [family.admit(name, body) for name, body in requests.items()], steps=100_000)
    family.until(lambda: len(family.tokens["stage-0"]) > 3)
    engine = family.pids[OTHER, "both"]
    stages = workers(engine)
    assert len(stages) == 2
    os.kill(stages[1], signal.SIGKILL)
    assert family.expect_exit(engine) == 1
    for stage in stages:
        until_ended(stage, "a stage of an engine that is gone")
    nothing_owned(family)
    family.reborn(OTHER, "both")
    again = bodies(family, answers, "stage-anew", ["greedy", "seed"])
    family.serve_both(OTHER, again, mixed=True)
    check(family, answers, "stage-anew", ["greedy", "seed"])


@pytest.mark.thorough
def test_a_new_memory_manager_is_bound_to_with_micro_batches_in_flight(
    family: Engines, answers: dict[str, Any]
) -> None:
    requests = {model: equal(family, f"struck-{model}", answers, 4, 900) for model in (ONE, OTHER)}
    for model, each in requests.items():
        family.lease(f"{model}/both", [family.admit(name, body) for name, body in each.items()], steps=100_000)
    family.until(lambda: all(len(family.tokens[f"struck-{model}-0"]) > 3 for model in requests))
    os.kill(family.manager.pid, signal.SIGKILL)
    family.manager.wait()
    family.manager = server.start(family.unit_spec)
    family.until(lambda: len(family.lost()) >= 2)
    assert {name for lost in family.lost() for name in lost.request_ids} >= {
        name for each in requests.values() for name in each if not family.finished(name)
    }
    for model in requests:
        family.serve_both(model, bodies(family, answers, f"anew-{model}"), mixed=True)
        check(family, answers, f"anew-{model}")
    nothing_owned(family)


@pytest.mark.thorough
def test_stages_of_two_ranks_each(answers: dict[str, Any]) -> None:
    """Four processes, each with half of the layers and half of the heads."""
    cases = ["greedy", "chunked", "stop-token", "penalties", "json"]
    model = deployed_model(
        MODEL, MODELS[MODEL], ranks=2, layers=2, max_num_batched_tokens=128, shape="one", num_blocks=64
    )
    with engines([model], ranks=4, stages=2) as family:
        assert len(workers(family.pids[MODEL, "both"])) == 4
        for again in range(2):
            family.serve_both(MODEL, bodies(family, answers, f"four-{again}", cases), mixed=True)
            check(family, answers, f"four-{again}", cases)
        assert all(len(report.bubbles) == 2 for report in reports(family))
        nothing_owned(family)
