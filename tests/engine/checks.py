"""What tests of real engines ask and compare: requests of the cases, their answers, pages, reports and workers."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import psutil
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.serial_utils import MsgpackDecoder

from muxserve.wire import Admit, HandOver, StepReport
from tests.engine.cases import CASES, GROWN, sampling
from tests.engine.harness import Engines


def bodies(
    family: Engines,
    stock: dict[str, Any],
    tag: str,
    cases: Iterable[str] | None = None,
    of: Mapping[str, Any] = CASES | GROWN,
) -> dict[str, bytes]:
    """Requests of the cases, named after them and `tag`; `of` says what they are."""
    return {
        f"{tag}-{case}": family.body(
            f"{tag}-{case}", stock[case]["prompt"], stock[case]["eos"], **sampling(of[case][1])
        )
        for case in cases or CASES
    }


def features(answer: Mapping[str, Any]) -> Any:
    """The images of a request, as stock vLLM's front end has made them."""
    return MsgpackDecoder(list[MultiModalFeatureSpec]).decode(base64.b64decode(answer["features"])) or None


def check(family: Engines, stock: dict[str, Any], tag: str, cases: Iterable[str] | None = None) -> None:
    """Their tokens are those of stock vLLM."""
    wrong = {
        case: (family.tokens[f"{tag}-{case}"], stock[case]["tokens"])
        for case in cases or CASES
        if family.tokens[f"{tag}-{case}"] != stock[case]["tokens"]
    }
    assert not wrong, wrong


def owned(family: Engines) -> dict[str, int]:
    """Pages of each model that are in use or handed off."""
    client = family.memory()
    try:
        stats = client.stats()
    finally:
        client.close()
    return {m["name"]: m["owned_pages"] + m["handed_pages"] for m in stats["models"]}


def nothing_owned(family: Engines) -> None:
    """Wait until every page has been given back."""
    family.until(lambda: not any(owned(family).values()))


def same_as_stock(family: Engines, model: str, stock: dict[str, Any], cases: Mapping[str, Any]) -> None:
    """With room for all, with cached prefixes, and with so few pages that requests are preempted and come back."""
    for tag in ("roomy", "cached"):
        family.serve(model, bodies(family, stock, f"{model}-{tag}", cases, of=cases))
        check(family, stock, f"{model}-{tag}", cases)
    with family.memory() as client:
        assert next(m["hits"] for m in client.stats()["models"] if m["name"] == model) > 0
    long = {f"{model}-long{i}": next(iter(cases)) for i in range(6)}
    returned = len(family.returned())
    with family.quota(model, 12):
        requests = bodies(family, stock, f"{model}-tight", cases, of=cases)
        for name, case in long.items():
            requests[name] = family.body(name, stock[case]["prompt"], max_tokens=250, ignore_eos=True)
        family.serve(model, requests)
    assert len(family.returned()) > returned
    check(family, stock, f"{model}-tight", cases)
    for name, case in long.items():
        assert family.tokens[name][: len(stock[case]["tokens"])] == stock[case]["tokens"]
    nothing_owned(family)


def reports(family: Engines, since: int = 0, lease: int | None = None) -> list[StepReport]:
    """What engines have reported of their steps, of one lease if it is given."""
    found = [m for _, m in family.reports[since:] if isinstance(m, StepReport)]
    return [m for m in found if lease is None or m.lease_id == lease]


def handed(
    family: Engines, kind: str, requests: dict[str, bytes], sent: dict[str, list[int]] | None = None
) -> list[Admit]:
    """Prefill them, with the tokens that they have already; what the decode engine is to be told."""
    since = len(family.reports)
    admits = [family.admit(name, body, output_tokens=(sent or {}).get(name, [])) for name, body in requests.items()]
    family.lease(f"{kind}/prefill", admits)

    def found() -> dict[str, HandOver]:
        told = [report for _, report in family.reports[since:] if isinstance(report, StepReport)]
        return {each.request_id: each for report in told for each in report.handed}

    family.until(lambda: found().keys() == requests.keys())
    return [family.adopt(name, requests[name], held) for name, held in found().items()]


def decoded(family: Engines, kind: str, admits: list[Admit], steps: int) -> None:
    """Decode for so many steps."""
    lease = family.lease(f"{kind}/decode", admits, steps=steps)
    family.until(lambda: any(report.lease_left == 0 for report in reports(family, lease=lease)))
    family.until(lambda: all(len(family.tokens[admit.request_id]) > steps for admit in admits))


def workers(engine: int) -> list[int]:
    """Pids of an engine's workers, in the order of their ranks."""
    titles = {child.pid: " ".join(child.cmdline()) for child in psutil.Process(engine).children()}
    return sorted((pid for pid, title in titles.items() if " rank " in title), key=lambda pid: titles[pid].split()[-1])


def adopted(family: Engines, model: str, requests: dict[str, bytes]) -> list[Admit]:
    """Prefill them; what the decode engine is to be sent."""
    family.lease(f"{model}/prefill", [family.admit(name, body) for name, body in requests.items()])
    family.until(lambda: all(name in family.held for name in requests))
    return [family.adopt(name, body, family.held[name]) for name, body in requests.items()]
