"""A model split over two ranks on CPU: two engines of two workers each, one pool per rank, one page table."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from muxserve import spec
from muxserve.memory import server
from muxserve.wire import StepReport
from tests.engine.cases import CASES, NOISE, sampling
from tests.engine.checks import bodies, check, nothing_owned, workers
from tests.engine.conftest import SPLIT, TRIED
from tests.engine.harness import ROUNDED, STATEFUL, TINY, Engines, deployed_model, engines
from tests.support.patience import until_ended

ROOT = Path(__file__).resolve().parents[2]
MODEL = SPLIT
PATH = ROOT / "configs/models" / MODEL


@pytest.fixture(scope="module")
def answers(stock_by_ranks: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return stock_by_ranks


@pytest.fixture(scope="module")
def stock(answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return answers[2]


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    with engines([deployed_model(MODEL, PATH, ranks=2, max_num_batched_tokens=128)], ranks=2) as running:
        yield running


def decoding(family: Engines, name: str, body: bytes) -> None:
    """Bring a request into the decode engine and let it produce some tokens there."""
    family.lease(f"{MODEL}/prefill", [family.admit(name, body)])
    family.until(lambda: name in family.held)
    held = family.held[name]
    admit = family.adopt(name, body, held)
    family.lease(f"{MODEL}/decode", [admit])
    family.until(lambda: len(family.tokens[name]) > 3)


def endless(family: Engines, stock: dict[str, Any], name: str) -> bytes:
    return family.body(name, stock["greedy"]["prompt"], max_tokens=900, ignore_eos=True)


def test_tokens_are_those_of_stock_vllm_with_as_many_ranks(family: Engines, stock: dict[str, Any]) -> None:
    family.serve(MODEL, bodies(family, stock, "same", TRIED))
    check(family, stock, "same", TRIED)
    nothing_owned(family)


def test_logprobs_are_those_of_one_rank_up_to_rounding(
    family: Engines, answers: dict[int, dict[str, Any]], stock: dict[str, Any]
) -> None:
    one = answers[1]["logprobs"]
    family.serve(MODEL, bodies(family, stock, "one", ["logprobs"]))
    assert family.tokens["one-logprobs"] == one["tokens"]
    got = [row for output in family.outputs["one-logprobs"] for row in output.new_logprobs.logprobs[:, 0]]
    assert got == pytest.approx([one["logprobs"][i][str(t)] for i, t in enumerate(one["tokens"])], abs=1e-4)


def test_ranks_draw_the_same_tokens_for_requests_without_a_seed(family: Engines, stock: dict[str, Any]) -> None:
    prompt = stock["greedy"]["prompt"]
    family.serve(
        MODEL, {"drawn": family.body("drawn", prompt, temperature=1.0, max_tokens=24, logprobs=0, ignore_eos=True)}
    )
    drawn = family.tokens["drawn"]
    told = [row for output in family.outputs["drawn"] for row in output.new_logprobs.logprobs[:, 0]]
    # A rank that had gone on with other tokens would have spoilt the sums of both.
    family.serve(MODEL, {"read": family.body("read", [*prompt, *drawn], max_tokens=1, prompt_logprobs=0)})
    (read,) = (
        o.new_prompt_logprobs_tensors for o in family.outputs["read"] if o.new_prompt_logprobs_tensors is not None
    )
    assert told == pytest.approx(read.logprobs[len(prompt) - 1 :, 0].tolist(), abs=1e-4)


def test_each_rank_writes_its_own_pool_at_the_same_pages(family: Engines, stock: dict[str, Any]) -> None:
    client = family.memory()
    try:
        client.reset_cache(MODEL)
        views = [client.map(MODEL, rank) for rank in range(2)]
        for view in views:
            view.pool[:] = 0
        body = family.body("pages", stock["greedy"]["prompt"], max_tokens=8, ignore_eos=True)
        family.lease(f"{MODEL}/prefill", [family.admit("pages", body)])
        family.until(lambda: "pages" in family.held)
        blocks = client.adopt(MODEL, family.held["pages"].key)
        pages = views[0].page_table[blocks].reshape(-1)
        assert np.array_equal(views[0].page_table[blocks], views[1].page_table[blocks])
        assert len(set(pages.tolist())) == blocks.size * 4 * 2  # layers, and KV heads of one rank
        written = [set(np.flatnonzero(view.pool.any(axis=1)).tolist()) for view in views]
        assert written[0] == written[1] == set(pages.tolist())
        # Each has its heads' keys and values, not a copy of the other's.
        assert not (views[0].pool[pages] == views[1].pool[pages]).all(axis=1).any()
        client.step(MODEL, release=blocks)
    finally:
        client.close()
    family.abort(f"{MODEL}/prefill", ["pages"])


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_goes_down_with_a_worker_and_its_requests_go_on(
    family: Engines, stock: dict[str, Any], rank: int
) -> None:
    name = f"worker-{rank}"
    decoding(family, name, endless(family, stock, name))
    engine = family.pids[MODEL, "decode"]
    both = workers(engine)
    assert len(both) == 2
    os.kill(both[rank], signal.SIGKILL)
    assert family.expect_exit(engine) == 1
    for worker in both:
        until_ended(worker, "a worker of an engine that is gone")
    nothing_owned(family)
    family.reborn(MODEL, "decode")
    # What the gateway would do: the tokens that are known, again.
    case = stock["greedy"]["tokens"]
    again = family.body(f"{name}-again", stock["greedy"]["prompt"], **sampling(CASES["greedy"][1]))
    family.tokens[f"{name}-again"] = case[:4]
    family.lease(f"{MODEL}/prefill", [family.admit(f"{name}-again", again, output_tokens=case[:4])])
    family.until(lambda: f"{name}-again" in family.held)
    held = family.held[f"{name}-again"]
    admit = family.adopt(f"{name}-again", again, held)
    family.lease(f"{MODEL}/decode", [admit])
    family.until(lambda: family.finished(f"{name}-again"))
    assert family.tokens[f"{name}-again"] == case


def test_workers_die_with_their_engine(family: Engines, stock: dict[str, Any]) -> None:
    decoding(family, "struck", endless(family, stock, "struck"))
    engine = family.pids[MODEL, "decode"]
    both = workers(engine)
    family.kill(MODEL, "decode")
    assert family.expect_exit(engine) == -signal.SIGKILL
    for worker in both:
        until_ended(worker, "a worker of an engine that is gone")
    nothing_owned(family)
    family.reborn(MODEL, "decode")


def test_workers_hold_the_engines_connection_and_bind_to_a_new_memory_manager(
    family: Engines, stock: dict[str, Any]
) -> None:
    decoding(family, "lost", endless(family, stock, "lost"))
    before = {phase: shared_connections(family.pids[MODEL, phase]) for phase in ("prefill", "decode")}
    os.kill(family.manager.pid, signal.SIGKILL)
    family.manager.wait()
    lost = len(family.lost())
    family.manager = server.start(family.unit_spec)
    family.until(lambda: len(family.lost()) >= lost + 2)
    family.serve(MODEL, bodies(family, stock, "anew", TRIED))
    check(family, stock, "anew", TRIED)
    nothing_owned(family)
    for phase in ("prefill", "decode"):
        after = shared_connections(family.pids[MODEL, phase])
        assert before[phase]
        assert after - before[phase], phase


def shared_connections(engine: int) -> set[str]:
    """The Unix sockets that an engine and all of its workers have open."""
    held = []
    for pid in (engine, *workers(engine)):
        sockets = (connection.fd for connection in psutil.Process(pid).net_connections("unix"))
        held.append({os.readlink(f"/proc/{pid}/fd/{fd}") for fd in sockets})
    return set.intersection(*held)


def test_what_ranks_share_has_no_name_that_a_kill_would_leave_behind(family: Engines) -> None:
    for worker in workers(family.pids[MODEL, "prefill"]):
        lines = Path(f"/proc/{worker}/maps").read_text().splitlines()
        shared = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and "muxserve" not in line}
        assert len(shared) >= 3  # messages in, messages out, activations
        assert [name for name in shared if not name.endswith("(deleted)")] == []


def test_a_worker_that_cannot_start_says_why(family: Engines) -> None:
    file = Path(family.unit_spec.run_dir) / "unit.json"
    right = file.read_bytes()
    family.kill(MODEL, "prefill")
    family.expect_exit(family.pids[MODEL, "prefill"])
    (model,) = family.unit_spec.models
    spec.save(msgspec.structs.replace(family.unit_spec, models=[msgspec.structs.replace(model, path="/none")]), file)
    family.fork(MODEL, "prefill")
    with pytest.raises(RuntimeError, match="/none"):
        family.expect_up({(MODEL, "prefill")})
    file.write_bytes(right)
    family.reborn(MODEL, "prefill")


# ---------------------------------------------------------------- models that keep states


@pytest.fixture(scope="module")
def stateful() -> Iterator[Engines]:
    """Each rank has the states of its heads. Chunks of 128 tokens, which a state goes through."""
    models = [
        deployed_model(
            kind,
            TINY[kind](),
            ranks=2,
            # Blocks as large as those of the others, whose numbers have twice as many bytes.
            block_tokens=128 if kind in ROUNDED else 64,
            quota_pages=1500,
            max_num_batched_tokens=128,
            prefix_caching=True,
            zeroed=True,
        )
        for kind in sorted(STATEFUL)
    ]
    with engines(models, ranks=2) as running:
        yield running


def serve_states(family: Engines, stock: dict[str, Any], kind: str, tag: str) -> int:
    """Have the cases answered as stock vLLM does; how many tokens of prompts were computed for it."""
    since = len(family.reports)
    for together in [[case] for case in NOISE] if kind in ROUNDED else [NOISE]:
        family.serve(kind, bodies(family, stock[kind], tag, together))
    check(family, stock[kind], tag, NOISE)
    nothing_owned(family)
    told = [report for engine, report in family.reports[since:] if engine == f"{kind}/prefill"]
    return sum(report.tokens for report in told if isinstance(report, StepReport))


@pytest.mark.parametrize("kind", sorted(STATEFUL))
def test_each_rank_keeps_the_states_of_its_heads(stateful: Engines, stock_split: dict[str, Any], kind: str) -> None:
    """Also behind snapshots."""
    cold, warm = (serve_states(stateful, stock_split, kind, f"{tag}-{kind}") for tag in ("cold", "warm"))
    assert warm < cold


def test_states_are_computed_again_where_a_memory_manager_died(stateful: Engines, stock_split: dict[str, Any]) -> None:
    lost = len(stateful.lost())
    os.kill(stateful.manager.pid, signal.SIGKILL)
    stateful.manager.wait()
    stateful.manager = server.start(stateful.unit_spec)
    stateful.until(lambda: len(stateful.lost()) - lost >= 2 * len(stateful.unit_spec.models))
    for kind in sorted(STATEFUL):
        assert serve_states(stateful, stock_split, kind, f"anew-{kind}") > 0
