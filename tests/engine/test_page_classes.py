"""Models whose layers differ in what they see, or keep latents or states: real engines; the test plays scheduler and
gateway."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from muxserve.memory import server
from muxserve.wire import Detach, Detached, StepReport
from tests.engine.cases import GROWN, NOISE
from tests.engine.checks import bodies, check, decoded, handed, nothing_owned, owned
from tests.engine.harness import (
    LATENT,
    MODELS,
    MULTI_MODAL,
    ROUNDED,
    STATEFUL,
    TINY,
    Engines,
    deployed_model,
    engines,
)
from tests.support.thoroughness import THOROUGH, cases

# Another model of full attention, on pages that are as large as those of latents, or of models that keep states.
BY_HEAD = "arithmetic"
SHARED_PAGES = 150
STATE_PAGES = 1200
UNCACHED = {"gemma3", "qwen3_5_moe"}
# A checkpoint with images, and the kind of its language model, which is all that is served of it.
WHOLE, TEXT = "qwen3_5-mm", "qwen3_5"
# Blocks as large as those of the other kinds, whose numbers have twice as many bytes.
STATEFUL_BLOCKS = dict.fromkeys({*ROUNDED, WHOLE}, 128)
WINDOWED = [kind for kind in TINY if kind not in LATENT | STATEFUL]


@pytest.fixture(scope="module")
def by_head() -> Iterator[Engines]:
    # Chunks of 128 tokens, so that the long prompts take several steps. One without prefix caching.
    models = [
        deployed_model(kind, make(), max_num_batched_tokens=128, prefix_caching=kind not in UNCACHED)
        for kind, make in TINY.items()
        if kind not in LATENT | STATEFUL
    ]
    with engines(models) as running:
        yield running


@pytest.fixture(scope="module")
def latents() -> Iterator[Engines]:
    quota = SHARED_PAGES // 3
    models = [deployed_model(kind, TINY[kind](), quota_pages=quota, num_blocks=64) for kind in sorted(LATENT)]
    changes = {"block_tokens": 288, "num_blocks": 20, "max_len": 3 * 288}
    models.append(deployed_model(BY_HEAD, MODELS[BY_HEAD], quota_pages=quota, **changes))
    with engines(models, pages=SHARED_PAGES) as running:
        yield running


@pytest.fixture(scope="module")
def stateful() -> Iterator[Engines]:
    """In one pool, in which one model leaves K and V in float32, one states in float32, and one K and V in bfloat16."""
    # Chunks of 128 tokens, which a state goes through.
    paths = {kind: TINY[kind]() for kind in sorted(STATEFUL)} | {BY_HEAD: MODELS[BY_HEAD]}
    if THOROUGH:
        paths |= {WHOLE: MULTI_MODAL[WHOLE]()}
    models = [
        deployed_model(
            kind,
            path,
            block_tokens=STATEFUL_BLOCKS.get(kind, 64),
            quota_pages=STATE_PAGES // len(paths),
            max_num_batched_tokens=128,
            prefix_caching=kind not in UNCACHED,
        )
        for kind, path in paths.items()
    ]
    # As many blocks as fill the pool.
    models = [
        msgspec.structs.replace(model, num_blocks=(STATE_PAGES - 1) // model.pages_per_block + 1, zeroed=True)
        for model in models
    ]
    with engines(models, pages=STATE_PAGES) as running:
        yield running


@pytest.fixture
def family(request: pytest.FixtureRequest, kind: str) -> Engines:
    """The engines that serve models of that kind."""
    name = "latents" if kind in LATENT else "stateful" if kind in STATEFUL else "by_head"
    running: Engines = request.getfixturevalue(name)
    return running


def serve(family: Engines, stock: dict[str, Any], kind: str, tag: str, cases: list[str]) -> None:
    """Those whose tokens depend on what else is in a batch one by one."""
    for together in [[case] for case in cases] if kind in {*ROUNDED, WHOLE} else [cases]:
        family.serve(kind, bodies(family, stock, tag, together))
    check(family, stock, tag, cases)


def grown(kind: str) -> list[str]:
    """Cases with long answers for a model of that kind."""
    return ["grown"] if kind in ROUNDED else list(GROWN)


SERVED = [
    pytest.param("mistral", marks=pytest.mark.serves("Mistral (with a window)", "served", "prefix cache")),
    pytest.param("gemma2", marks=pytest.mark.serves("Gemma2", "served", "prefix cache")),
    pytest.param("gemma3", marks=pytest.mark.serves("Gemma3 (text)", "served")),
    pytest.param("gpt_oss", marks=pytest.mark.serves("GptOss", "served", "prefix cache")),
    pytest.param("deepseek_v2", marks=pytest.mark.serves("DeepseekV2", "served", "prefix cache")),
    pytest.param("deepseek_v3", marks=pytest.mark.serves("DeepseekV3", "served", "prefix cache")),
    pytest.param(
        "granite_hybrid", marks=pytest.mark.serves("GraniteMoeHybrid (Granite 4 H)", "served", "prefix cache")
    ),
    pytest.param("nemotron_h", marks=pytest.mark.serves("NemotronH", "served", "prefix cache")),
    pytest.param("qwen3_next", marks=pytest.mark.serves("Qwen3Next", "served", "prefix cache")),
    pytest.param("qwen3_5", marks=pytest.mark.serves("Qwen3_5", "served", "prefix cache")),
    pytest.param("qwen3_5_moe", marks=pytest.mark.serves("Qwen3_5Moe", "served")),
]


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind.values[0] in TINY])
def test_tokens_are_those_of_stock_vllm(family: Engines, stock_tiny: dict[str, Any], kind: str) -> None:
    serve(family, stock_tiny[kind], kind, kind, NOISE)
    nothing_owned(family)


@pytest.mark.thorough
@pytest.mark.serves("Qwen3_5 (text of multi-modal)", "served")
def test_text_of_a_checkpoint_with_images(stateful: Engines, stock_tiny: dict[str, Any]) -> None:
    """Tokens are those of its language model alone."""
    serve(stateful, stock_tiny[TEXT], WHOLE, "whole", NOISE)


@pytest.mark.parametrize("kind", [kind for kind in TINY if kind not in ROUNDED])
def test_preempted_requests_keep_their_tokens(family: Engines, stock_tiny: dict[str, Any], kind: str) -> None:
    """Two grow to four blocks each, or to three within a window, where there are five, and those of their states."""
    states = family.unit_spec.model(kind).state_blocks
    since = len(family.returned())
    with family.quota(kind, blocks=5 + 2 * states):
        family.serve(kind, bodies(family, stock_tiny[kind], f"tight-{kind}", GROWN))
    assert len(family.returned()) > since
    check(family, stock_tiny[kind], f"tight-{kind}", GROWN)
    nothing_owned(family)


def test_latents_and_heads_share_a_pool(latents: Engines, stock: dict[str, Any], stock_tiny: dict[str, Any]) -> None:
    """Pages go from the one model to the other and back, with the tokens of each."""
    with latents.memory() as client:
        assert len(client.stats()["pools"]) == 1
    kind = min(LATENT)
    for turn in range(2):
        for model, known in ((BY_HEAD, stock[BY_HEAD]), (kind, stock_tiny[kind])):
            latents.forget_prefixes(BY_HEAD)
            latents.serve(model, bodies(latents, known, f"share{turn}-{model}", ["chunked"]))
            check(latents, known, f"share{turn}-{model}", ["chunked"])
            nothing_owned(latents)


def test_states_and_heads_share_a_pool(stateful: Engines, stock: dict[str, Any], stock_tiny: dict[str, Any]) -> None:
    """Pages go from one model to the others and back, with the tokens of each, whatever was in them."""
    known = {kind: stock_tiny[kind] for kind in sorted(STATEFUL)} | {BY_HEAD: stock[BY_HEAD]}
    with stateful.memory() as client:
        assert len(client.stats()["pools"]) == 1
    for turn in range(2):
        for model, answers in known.items():
            stateful.forget_prefixes(BY_HEAD)
            serve(stateful, answers, model, f"share{turn}-{model}", ["chunked", "greedy"])
            nothing_owned(stateful)


@pytest.mark.parametrize("kind", TINY)
def test_a_cached_prefix_is_not_computed_again(family: Engines, stock_tiny: dict[str, Any], kind: str) -> None:
    def computed(tag: str) -> int:
        since = len(family.reports)
        family.serve(kind, bodies(family, stock_tiny[kind], tag, ["chunked"]))
        check(family, stock_tiny[kind], tag, ["chunked"])
        told = [report for engine, report in family.reports[since:] if engine == f"{kind}/prefill"]
        return sum(report.tokens for report in told if isinstance(report, StepReport))

    family.forget_prefixes(kind)
    cold, warm = computed(f"cold-{kind}"), computed(f"warm-{kind}")
    block = family.unit_spec.model(kind).block_tokens
    assert cold == len(stock_tiny[kind]["chunked"]["prompt"])
    assert warm == (cold if kind in UNCACHED else cold - (cold - 1) // block * block)


def prefilled(family: Engines, kind: str, name: str, prompt: list[int], **params: Any) -> tuple[int, list[int]]:
    """How many tokens are computed of a prompt, and how it goes on."""
    since = len(family.reports)
    family.serve(kind, {name: family.body(name, prompt, max_tokens=24, ignore_eos=True, **params)})
    told = [report for engine, report in family.reports[since:] if engine == f"{kind}/prefill"]
    return sum(report.tokens for report in told if isinstance(report, StepReport)), family.tokens[name]


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 9}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", sorted(STATEFUL - UNCACHED))
def test_prompts_begin_behind_what_two_before_them_had_in_common(
    stateful: Engines, stock_tiny: dict[str, Any], kind: str, sampled: dict[str, Any]
) -> None:
    """The second one finds the tokens cached, but no states; these are kept there for the third."""
    block, prompt = stateful.unit_spec.model(kind).block_tokens, stock_tiny[kind]["chunked"]["prompt"]
    shared = 2 * block
    prompts = [prompt[: shared + 10 * part] + prompt[part : 200 + part] for part in (1, 2, 3)]
    stateful.forget_prefixes(kind)
    expected = prefilled(stateful, kind, f"parts-cold-{kind}{len(sampled)}", prompts[2], **sampled)
    stateful.forget_prefixes(kind)
    first, second, third = (
        prefilled(stateful, kind, f"parts{index}-{kind}{len(sampled)}", each, **sampled)
        for index, each in enumerate(prompts)
    )
    assert [first[0], second[0]] == [len(each) for each in prompts[:2]]
    assert third == (len(prompts[2]) - shared, expected[1])
    nothing_owned(stateful)


@pytest.mark.parametrize("kind", sorted(STATEFUL - UNCACHED))
def test_a_snapshot_is_left_alone_where_pages_are_short(
    stateful: Engines, stock_tiny: dict[str, Any], kind: str
) -> None:
    """A request that has pages for its own states only would otherwise wait for those of the snapshot for ever."""
    model, prompt = stateful.unit_spec.model(kind), stock_tiny[kind]["chunked"]["prompt"]
    stateful.forget_prefixes(kind)
    expected = prefilled(stateful, kind, f"short-cold-{kind}", prompt)
    blocks = model.state_blocks + -(-(len(prompt) + 24) // model.block_tokens)
    with stateful.memory() as client:
        usual = next(m["quota_pages"] for m in client.stats()["models"] if m["name"] == kind)
        client.set_quotas({kind: blocks * model.pages_per_block})
        try:
            assert prefilled(stateful, kind, f"short-{kind}", prompt) == expected
        finally:
            client.set_quotas({kind: usual})
    assert prefilled(stateful, kind, f"room-{kind}", prompt)[0] < len(prompt)
    nothing_owned(stateful)


@pytest.mark.parametrize("kind", ["mistral", "deepseek_v2", "granite_hybrid"])
def test_cached_prefixes_of_those_that_wait_leave_the_first_its_pages(
    family: Engines, stock_tiny: dict[str, Any], kind: str
) -> None:
    """Two whose prompts are cached, where there are pages for one."""
    model, prompt = family.unit_spec.model(kind), stock_tiny[kind]["chunked"]["prompt"]
    prompts = {f"one-{kind}": prompt, f"other-{kind}": prompt[1:] + prompt[:1]}
    expected = {name: prefilled(family, kind, f"cold-{name}", each)[1] for name, each in prompts.items()}
    blocks = model.state_blocks + -(-(len(prompt) + 24) // model.block_tokens)
    with family.memory() as client:
        usual = next(m["quota_pages"] for m in client.stats()["models"] if m["name"] == kind)
        client.set_quotas({kind: blocks * model.pages_per_block})
        try:
            family.serve(
                kind, {name: family.body(name, each, max_tokens=24, ignore_eos=True) for name, each in prompts.items()}
            )
        finally:
            client.set_quotas({kind: usual})
    assert {name: family.tokens[name] for name in prompts} == expected
    nothing_owned(family)


@pytest.mark.parametrize("kind", sorted(LATENT))
def test_a_step_has_prompts_with_and_without_a_cached_prefix(
    latents: Engines, stock_tiny: dict[str, Any], kind: str
) -> None:
    latents.forget_prefixes(kind)
    for tag in ("cold", "warm"):
        serve(latents, stock_tiny[kind], kind, f"both-{tag}-{kind}", NOISE)


@pytest.mark.parametrize("kind", WINDOWED)
def test_pages_behind_the_window_are_given_back(family: Engines, stock_tiny: dict[str, Any], kind: str) -> None:
    """And nobody reads what stands in their place, which is made to spoil every sum that it is in."""
    model = family.unit_spec.model(kind)
    requests = bodies(family, stock_tiny[kind], f"long-{kind}", list(GROWN))
    with family.memory() as client:
        null_page = client.map(kind).pool[0]
    null_page[:] = 0xFF  # not a number
    try:
        decoded(family, kind, handed(family, kind, requests), steps=180)
        held = owned(family)[kind]
        family.lease(f"{kind}/decode")
        family.until(lambda: all(family.finished(name) for name in requests))
    finally:
        null_page[:] = 0
    check(family, stock_tiny[kind], f"long-{kind}", list(GROWN))
    nothing_owned(family)
    full, expected = model.layers - len(model.windowed_layers), 0
    for case in GROWN:
        computed = len(stock_tiny[kind][case]["prompt"]) + 180
        blocks = -(-computed // model.block_tokens)
        behind = (computed - model.window + 1) // model.block_tokens
        assert behind > 0
        expected += model.kv_heads * (blocks * full + (blocks - behind) * len(model.windowed_layers))
    assert held == expected


@pytest.mark.parametrize("kind", cases(TINY, ["granite_hybrid"]))
def test_requests_go_on_after_the_death_of_their_engine(family: Engines, stock_tiny: dict[str, Any], kind: str) -> None:
    """As a gateway does: with the tokens that it has, to whatever engine there is."""
    requests = bodies(family, stock_tiny[kind], f"dead-{kind}", grown(kind))
    decoded(family, kind, handed(family, kind, requests), steps=120)
    family.kill(kind, "decode")
    family.reborn(kind, "decode")
    sent = {name: list(family.tokens[name]) for name in requests}
    family.lease(f"{kind}/decode", handed(family, kind, requests, sent))
    family.until(lambda: all(family.finished(name) for name in requests))
    nothing_owned(family)
    if kind not in ROUNDED:
        check(family, stock_tiny[kind], f"dead-{kind}", grown(kind))
        return
    # In 16 bits tokens that are computed as a prompt leave another state, and other K and V, than those that were
    # decoded: what comes after them is what comes after such a prompt.
    for name, known in ((f"dead-{kind}-{case}", stock_tiny[kind][case]) for case in grown(kind)):
        left = len(known["tokens"]) - len(sent[name])
        body = family.body(f"as-{name}", known["prompt"] + sent[name], max_tokens=left, ignore_eos=True)
        family.forget_prefixes(kind)
        family.serve(kind, {f"as-{name}": body})
        assert sent[name] == known["tokens"][: len(sent[name])]
        assert family.tokens[name] == sent[name] + family.tokens[f"as-{name}"]


@pytest.mark.parametrize("kind", cases(TINY, ["deepseek_v2"]))
def test_requests_that_leave_with_their_blocks_go_on_elsewhere(
    family: Engines, stock_tiny: dict[str, Any], kind: str
) -> None:
    """As those do that move to another unit: adopted as blocks that nobody here has filled."""
    requests = bodies(family, stock_tiny[kind], f"moved-{kind}", grown(kind))
    admits = handed(family, kind, requests)
    decoded(family, kind, admits, steps=120)
    since = len(family.reports)
    for admit in admits:
        family.send(f"{kind}/decode", Detach(admit.request_id, admit.incarnation, f"{admit.request_id}/out", 0))

    def gone() -> list[Detached]:
        return [message for _, message in family.reports[since:] if isinstance(message, Detached)]

    family.until(lambda: len(gone()) == len(admits))
    assert all(left.key for left in gone())
    back = [family.adopt(left.request_id, requests[left.request_id], left, foreign=True) for left in gone()]
    family.lease(f"{kind}/decode", back)
    family.until(lambda: all(family.finished(name) for name in requests))
    check(family, stock_tiny[kind], f"moved-{kind}", grown(kind))
    nothing_owned(family)


@pytest.mark.thorough
def test_snapshots_are_gone_with_the_memory_manager(stateful: Engines, stock_tiny: dict[str, Any]) -> None:
    """Those kept after it has come back are found."""
    kind = "granite_hybrid"
    prompt = stock_tiny[kind]["chunked"]["prompt"]
    expected = prefilled(stateful, kind, "before", prompt)[1]
    lost = len(stateful.lost())
    os.kill(stateful.manager.pid, signal.SIGKILL)
    stateful.manager.wait()
    stateful.manager = server.start(stateful.unit_spec)
    stateful.until(lambda: len(stateful.lost()) - lost >= 2 * len(stateful.unit_spec.models))
    block = stateful.unit_spec.model(kind).block_tokens
    last = (len(prompt) - 1) // block * block
    for name, computed in (("cold-again", len(prompt)), ("warm-again", len(prompt) - last)):
        assert prefilled(stateful, kind, name, prompt) == (computed, expected)
    nothing_owned(stateful)
