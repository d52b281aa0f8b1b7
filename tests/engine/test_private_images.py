"""Models that see images with a cache of vLLM's own: real engines; the test plays unit scheduler and gateway, and has
what stock vLLM's front end makes of the images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from muxserve.wire import StepFailed
from tests.engine.cases import SEEN, sampling
from tests.engine.checks import check, features
from tests.engine.harness import SEEING_PRIVATE, Engines, engines, private_model
from tests.support import poison

KIND = "aria"
# The same with hardly more room than the longest sequence needs.
TIGHT = "tight"


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    # In chunks of 24 tokens, which end within an image.
    changes: dict[str, Any] = {
        "sees_images": True,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 24,
        "engine_args": {"logits_processors": [poison.NAME]},
    }
    models = [private_model(kind, make(), **changes) for kind, make in SEEING_PRIVATE.items()]
    models.append(private_model(TIGHT, SEEING_PRIVATE[KIND](), kv_bytes=9 << 18, **changes))
    with engines(models) as running:
        yield running


def asked(family: Engines, stock: dict[str, Any], tag: str, cases: list[str] | None = None) -> dict[str, bytes]:
    return {f"{tag}-{case}": body(family, stock, f"{tag}-{case}", case) for case in cases or stock}


def body(family: Engines, stock: dict[str, Any], name: str, case: str, **more: Any) -> bytes:
    answer, params = stock[case], {**sampling(SEEN[case][2]), **more}
    return family.body(name, answer["prompt"], answer["eos"], features=features(answer), **params)


SERVED = [
    pytest.param("aria", marks=pytest.mark.serves("Aria (with images, private)", "served", "prefix cache")),
    pytest.param("blip2", marks=pytest.mark.serves("Blip2 (with images, private)", "served")),
    # With torchvision, which the pinned packages lack.
    pytest.param("qwen2_5_vl"),
]


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind.values[0] in SEEING_PRIVATE])
def test_tokens_are_those_of_stock_vllm(family: Engines, stock_seeing_private: dict[str, Any], kind: str) -> None:
    """Greedy and seeded, all at once, in chunks that end within an image, and once more with what is cached then."""
    stock = stock_seeing_private[kind]
    assert stock["image"]["tokens"] != stock["another"]["tokens"], "else nothing is seen"
    for tag in ("first", "again"):
        family.serve_both(kind, asked(family, stock, f"{kind}-{tag}"), mixed=True)
        check(family, stock, f"{kind}-{tag}", stock)


def test_preempted_requests_see_their_images_again(family: Engines, stock_seeing_private: dict[str, Any]) -> None:
    stock, tag = stock_seeing_private[KIND], "tight"
    cases = ["two", "crossing", "image", "another", "long-none"]
    family.serve_both(TIGHT, asked(family, stock, tag, cases), mixed=True)
    check(family, stock, tag, cases)


@pytest.mark.parametrize("kind", SEEING_PRIVATE)
def test_after_a_death_requests_are_computed_again(
    family: Engines, stock_seeing_private: dict[str, Any], kind: str
) -> None:
    stock, tag = stock_seeing_private[kind], f"{kind}-dead"
    cases = [case for case in ("image", "two", "seed") if case in stock]
    requests = asked(family, stock, tag, cases)
    family.lease(f"{kind}/both", [family.admit(name, body) for name, body in requests.items()], steps=12)
    family.until(lambda: all(family.tokens[name] for name in requests))
    pid = family.pids[kind, "both"]
    family.kill(kind, "both")
    family.expect_exit(pid)
    family.reborn(kind, "both")
    sent = {name: list(family.tokens[name]) for name in requests}
    again = [family.admit(name, body, output_tokens=sent[name]) for name, body in requests.items()]
    family.lease(f"{kind}/both", again)
    family.until(lambda: all(family.finished(name) for name in requests))
    check(family, stock, tag, cases)


def test_after_a_step_that_failed_images_are_computed_anew(
    family: Engines, stock_seeing_private: dict[str, Any]
) -> None:
    stock = stock_seeing_private[KIND]
    bad = body(family, stock, "bad", "image", extra_args={"poison": "raise", "poison_at": 0})
    family.lease(f"{KIND}/both", [family.admit("bad", bad)])
    family.until(lambda: any(isinstance(told, StepFailed) for _, told in family.reports))
    family.serve_both(KIND, asked(family, stock, "after", ["image", "two"]), mixed=True)
    check(family, stock, "after", ["image", "two"])
