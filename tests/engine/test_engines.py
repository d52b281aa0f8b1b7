"""Two models' prefill and decode engines on one pool, real processes; the test plays unit scheduler and gateway."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from muxserve.memory import server
from muxserve.wire import StepReport
from tests.engine.cases import CASES, LONG, sampling
from tests.engine.checks import bodies, check, owned
from tests.engine.harness import MODELS, Engines, deployed_model, engines

MHA, QWEN = MODELS


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    # Chunks of 128 tokens, so that the long prompts take several steps.
    models = [deployed_model(n, p, max_num_batched_tokens=128) for n, p in MODELS.items()]
    with engines(models) as running:
        yield running


@pytest.mark.serves("Llama", "served")
@pytest.mark.serves("Qwen3", "served")
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_stock_vllm(family: Engines, stock: dict[str, Any], model: str) -> None:
    family.serve(model, bodies(family, stock[model], model))
    check(family, stock[model], model)
    for case in CASES:
        last = family.outputs[f"{model}-{case}"]
        (reason,) = [str(output.finish_reason) for output in last if output.finish_reason is not None]
        assert reason == stock[model][case]["finish"], case
    family.until(lambda: not any(owned(family).values()))


def test_logprobs_agree(family: Engines, stock: dict[str, Any]) -> None:
    expected = stock[MHA]["logprobs"]["logprobs"]
    family.serve(MHA, bodies(family, stock[MHA], "lp", ["logprobs"]))
    got = [row for output in family.outputs["lp-logprobs"] for row in output.new_logprobs.logprobs[:, 0]]
    tokens = stock[MHA]["logprobs"]["tokens"]
    assert got == pytest.approx([expected[i][str(token)] for i, token in enumerate(tokens)], abs=1e-3)


def test_prompt_statistics_and_prompt_logprobs_come_once(family: Engines, stock: dict[str, Any]) -> None:
    family.serve(MHA, bodies(family, stock[MHA], "once", ["prompt-logprobs"]))
    outputs = family.outputs["once-prompt-logprobs"]
    assert sum(output.new_prompt_logprobs_tensors is not None for output in outputs) == 1
    assert sum(output.prefill_stats is not None for output in outputs) == 1


@pytest.mark.serves("Qwen3", "prefix cache")
def test_cached_prefix_is_not_computed_again(family: Engines, stock: dict[str, Any]) -> None:
    def computed(tag: str) -> int:
        since = len(family.reports)
        family.serve(QWEN, bodies(family, stock[QWEN], tag, ["chunked"]))
        check(family, stock[QWEN], tag, ["chunked"])
        return sum(
            report.tokens
            for engine, report in family.reports[since:]
            if isinstance(report, StepReport) and engine == f"{QWEN}/prefill"
        )

    client = family.memory()
    client.reset_cache(client.map(QWEN))
    client.close()
    cold, warm = computed("cold"), computed("warm")
    block = 32
    assert cold == len(stock[QWEN]["chunked"]["prompt"])
    assert warm == cold - (cold - 1) // block * block


def test_blocks_filled_while_decoding_are_found_by_the_prefill_engine(family: Engines, stock: dict[str, Any]) -> None:
    prompt, tokens = stock[QWEN]["chunked"]["prompt"], stock[QWEN]["chunked"]["tokens"]
    family.serve(QWEN, bodies(family, stock[QWEN], "first", ["chunked"]))
    since = len(family.reports)
    again = prompt + tokens[:-1]
    family.serve(QWEN, {"turn-2": family.body("turn-2", again, max_tokens=1)})
    assert family.tokens["turn-2"] == tokens[-1:]
    computed = sum(r.tokens for e, r in family.reports[since:] if e == f"{QWEN}/prefill" and isinstance(r, StepReport))
    assert computed == len(again) - (len(again) - 1) // 32 * 32


def test_steps_run_only_under_a_lease(family: Engines, stock: dict[str, Any]) -> None:
    prompt = stock[MHA]["greedy"]["prompt"]
    body = family.body("leased", prompt, max_tokens=50, ignore_eos=True)
    family.lease(f"{MHA}/prefill", [family.admit("leased", body)], steps=1)
    family.until(lambda: "leased" in family.held)
    since = len(family.reports)
    admit = family.adopt("leased", body, family.held["leased"])
    lease = family.lease(f"{MHA}/decode", [admit], steps=5)

    def last() -> Any:
        return family.reports[-1][1] if len(family.reports) > since else None

    family.until(lambda: last() is not None and last().lease_left == 0)
    # A message that is answered at once shows that no further step came in between.
    family.abort(f"{MHA}/decode", ["leased"])
    family.until(lambda: last().finished == ["leased"])
    reports = [r for e, r in family.reports[since:] if r.lease_id == lease and r.steps]
    assert sum(r.steps for r in reports) == 5
    assert sum(r.tokens for r in reports) == 5
    # The first with what came with the lease, then when half of it was used, then its end.
    assert [r.lease_left for r in reports] == [4, 2, 0]
    family.until(lambda: len(family.tokens["leased"]) == 6)
    family.until(lambda: owned(family)[MHA] == 0)


@pytest.mark.parametrize("moment", ["queued", "mid-prompt", "handed", "decoding"])
def test_abort_gives_pages_back_at_any_moment(family: Engines, stock: dict[str, Any], moment: str) -> None:
    name = f"gone-{moment}"
    body = family.body(name, stock[MHA]["chunked"]["prompt"], max_tokens=300, ignore_eos=True)
    steps = {"queued": 0, "mid-prompt": 2}.get(moment, 100)
    since = len(family.reports)
    client = family.memory()
    client.reset_cache(client.map(MHA))
    family.lease(f"{MHA}/prefill", [family.admit(name, body)], steps=steps)
    if moment == "mid-prompt":
        family.until(lambda: len(family.reports) >= since + 2)
        assert owned(family)[MHA] > 0
    if moment in ("handed", "decoding"):
        family.until(lambda: name in family.held)
        key = family.held[name].key
        assert owned(family)[MHA] > 0
    if moment == "handed":
        client.drop(client.map(MHA), key)
    elif moment == "decoding":
        admit = family.adopt(name, body, family.held[name])
        family.lease(f"{MHA}/decode", [admit])
        family.until(lambda: len(family.tokens[name]) > 3)
        family.abort(f"{MHA}/decode", [name])
        family.until(lambda: any(name in getattr(r, "finished", []) for _, r in family.reports[since:]))
    else:
        family.abort(f"{MHA}/prefill", [name])
        family.until(lambda: any(name in getattr(r, "finished", []) for _, r in family.reports[since:]))
    client.close()
    family.until(lambda: owned(family)[MHA] == 0)


@pytest.mark.thorough
def test_preempted_requests_come_back_and_end_with_the_same_tokens(family: Engines, stock: dict[str, Any]) -> None:
    client = family.memory()
    view = client.map(MHA)
    quota = next(m["quota_pages"] for m in client.stats()["models"] if m["name"] == MHA)
    cases = ["greedy", "seed", "logprobs", "min-tokens", "json", "penalties", "chunked", "seed-top-p"]
    per_block = family.unit_spec.model(MHA).pages_per_block
    client.reset_cache(view)
    try:
        client.set_quotas({MHA: 12 * per_block})
        before = len(family.returned())
        requests = bodies(family, stock[MHA], "tight", cases)
        requests |= {f"tight{i}": family.body(f"tight{i}", stock[MHA]["greedy"]["prompt"], max_tokens=250,
                                              ignore_eos=True) for i in range(6)}  # fmt: skip
        family.serve(MHA, requests)
    finally:
        client.set_quotas({MHA: quota})
        client.close()
    returned = len(family.returned()) - before
    assert returned > 0, "the quota was not tight enough to preempt anything"
    check(family, stock[MHA], "tight", cases)
    assert len({tuple(family.tokens[f"tight{i}"]) for i in range(6)}) == 1
    family.until(lambda: owned(family)[MHA] == 0)


def test_a_request_goes_on_from_tokens_sent_before(family: Engines, stock: dict[str, Any]) -> None:
    cases = [case for case in CASES if len(stock[QWEN][case]["tokens"]) > 3]
    requests = bodies(family, stock[QWEN], "resumed", cases)
    keep = 3
    admits = []
    for case in cases:
        name = f"resumed-{case}"
        family.tokens[name] = stock[QWEN][case]["tokens"][:keep]
        admits.append(family.admit(name, requests[name], output_tokens=stock[QWEN][case]["tokens"][:keep]))
    family.lease(f"{QWEN}/prefill", admits)
    adopted: set[str] = set()

    def progress() -> bool:
        new = [h for h in family.held.values() if h.request_id in requests and h.request_id not in adopted]
        if new:
            adopted.update(h.request_id for h in new)
            family.lease(f"{QWEN}/decode", [family.adopt(h.request_id, requests[h.request_id], h) for h in new])
        return all(family.finished(name) for name in requests)

    family.until(progress)
    check(family, stock[QWEN], "resumed", cases)


def test_a_dead_prefill_engine_does_not_take_its_hand_offs_along(family: Engines, stock: dict[str, Any]) -> None:
    body = family.body("orphan", stock[QWEN]["greedy"]["prompt"], **sampling(CASES["greedy"][1]))
    family.lease(f"{QWEN}/prefill", [family.admit("orphan", body)])
    family.until(lambda: "orphan" in family.held)
    hellos = len(family.hellos)
    family.kill(QWEN, "prefill")
    family.fork(QWEN, "prefill")
    admit = family.adopt("orphan", body, family.held["orphan"])
    family.lease(f"{QWEN}/decode", [admit])
    family.until(lambda: family.finished("orphan"))
    assert family.tokens["orphan"] == stock[QWEN]["greedy"]["tokens"]
    family.until(lambda: len(family.hellos) > hellos)
    family.serve(QWEN, bodies(family, stock[QWEN], "reborn", ["greedy"]))
    check(family, stock[QWEN], "reborn", ["greedy"])


def test_engines_bind_to_a_new_memory_manager(family: Engines, stock: dict[str, Any]) -> None:
    body = family.body("struck", stock[MHA]["greedy"]["prompt"], max_tokens=900, ignore_eos=True)
    family.lease(f"{MHA}/prefill", [family.admit("struck", body)])
    family.until(lambda: "struck" in family.held)
    admit = family.adopt("struck", body, family.held["struck"])
    family.lease(f"{MHA}/decode", [admit])
    family.until(lambda: len(family.tokens["struck"]) > 3)
    os.kill(family.manager.pid, signal.SIGKILL)
    family.manager.wait()
    family.manager = server.start(family.unit_spec)
    # On a busy machine it may have ended before.
    family.until(lambda: family.finished("struck") or any("struck" in each.request_ids for each in family.lost()))
    # Every engine notices, also the idle ones.
    family.until(lambda: len(family.lost()) >= 2 * len(MODELS))
    for model in MODELS:
        family.serve(model, bodies(family, stock[model], f"anew-{model}"))
        check(family, stock[model], f"anew-{model}")
    family.until(lambda: not any(owned(family).values()))


def test_what_is_forked_looks_for_no_kernels_to_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    from muxserve.forks.warm_parent import prepare_workers

    looked, look = [], dispatcher._rebind_kernels
    monkeypatch.setattr(dispatcher, "_rebind_kernels", lambda kernels: (looked.append(kernels), look(kernels)))
    before = vars(type(current_platform))["register_triton_kernel_overrides"]
    monkeypatch.setattr(type(current_platform), "register_triton_kernel_overrides", before)
    prepare_workers()
    looked.clear()
    current_platform.register_triton_kernel_overrides()  # as each worker does
    assert looked == []
    assert isinstance(ComputeSlotMappingKernel.kernel, dispatcher.KernelOverride)


def test_the_engines_fit_the_pinned_vllm() -> None:
    from muxserve.vllm import engine_internals

    assert engine_internals.problems() == []


def test_long_is_longer_than_a_chunk(stock: dict[str, Any]) -> None:
    assert len(LONG) > 0
    assert all(len(stock[model]["chunked"]["prompt"]) > 128 for model in MODELS)
