"""What units report of a rolling model, put into the members that the policies see."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from muxserve.global_scheduler.model_scheduler_base import load_state
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.constraints import promise
from muxserve.rolling.member import Admitted, MacroMember
from muxserve.rolling.rules import RollingRules
from muxserve.wire import RollingReport, RollingRequest

_NOTHING: Mapping[str, MigratedProgress] = {}


@dataclass(slots=True)
class RollingNews:
    """The news of a report: the requests that it names, and those that have ended, with their last state."""

    named: list[str] = field(default_factory=list)
    ended: list[tuple[str, Admitted]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MigratedProgress:
    """What a request that came with its KV had before, in another replica: the time it had saved (seconds) at `at`, and
    since when it decodes; None: it had not begun."""

    saved: float
    at: float
    since: float | None


def rebuild(
    member: MacroMember,
    report: RollingReport,
    rules: RollingRules,
    expected: int,
    unnamed: Iterable[str],
    now: float,
) -> list[str]:
    """The replica has exactly the requests of this report, and those sent there too recently for it to name
    them (`unnamed`). The saved time of requests that decode stays. An answer is
    `expected` to have that many tokens. Returns the ids that the report names."""
    known = dict(member.requests)
    member.clear()
    member.counted(report.steps, now - report.counted_ago, report.step_seconds)
    named = {request.request_id for request in report.requests}
    for request in report.requests:
        if request.decoding_seconds is not None:
            before = known.get(request.request_id)
            place, since = (before.place, before.since) if before is not None else (None, None)
            tokens = promise(request.tokens, request.max_tokens, member.capacity, expected)
            if since is None:
                since = now - request.decoding_seconds
            member.found(request.request_id, tokens, since, now, place)
    for request in report.requests:
        if not request.prefilled and request.decoding_seconds is None:
            _admit(member, request, rules, expected, now)
    for request_id in unnamed:
        sent = known.get(request_id)
        if request_id not in named and sent is not None:
            member.admitted(request_id, sent.tokens, sent.predicted, now)
    for request in report.requests:
        if request.prefilled and request.decoding_seconds is None:
            _waits_to_decode(member, request, expected, now)
    return list(named)


def apply(
    member: MacroMember,
    report: RollingReport,
    rules: RollingRules,
    expected: int,
    unnamed: Container[str],
    now: float,
    brought: Mapping[str, MigratedProgress] = _NOTHING,
) -> RollingNews:
    """What has happened in the replica since its last report.

    Args:
        expected: tokens of an answer.
        unnamed: requests that were sent there and that it has not named yet. What it tells of these before it names
            them is about former lives.
        brought: of those that came with their KV, what is known from where they were.
    """
    news = RollingNews()
    member.counted(report.steps, now - report.counted_ago, report.step_seconds)
    came = {request.request_id for request in report.requests}
    for request in report.requests:
        news.named.append(request.request_id)
        if request.request_id not in unnamed:
            _came(member, request, rules, expected, brought.get(request.request_id), now)
        elif request.prefilled:
            member.prefilled(request.request_id, now)
    done = [request_id for request_id in report.prefilled if request_id not in unnamed or request_id in came]
    member.measured(report.prefill_seconds, done)
    for request_id in done:
        member.prefilled(request_id, now)
    for request_id in report.left:
        if request_id not in unnamed or request_id in came:
            was = member.left(request_id, now)
            if was is not None:
                news.ended.append((request_id, was))
    return news


def show(load: InstanceLoad, member: MacroMember | None, spared: float | None, now: float) -> dict[str, object]:
    """How a replica stands, as JSON-ready data; without a member its requests are not known."""
    shown = load_state(load)
    if member is not None:
        saved = member.saved(now, spared)
        shown |= {
            "window": member.window.value,
            "pending": member.pending,
            "pending_seconds": member.pending_seconds,
            "decoding": member.decoding,
            "promised": member.promised,
            "saved_seconds": saved if math.isfinite(saved) else None,
            "bias": member.bias,
        }
    return shown


def _came(
    member: MacroMember,
    request: RollingRequest,
    rules: RollingRules,
    expected: int,
    brought: MigratedProgress | None,
    now: float,
) -> None:
    if request.decoding_seconds is not None:
        tokens = promise(request.tokens, request.max_tokens, member.capacity, expected)
        since, place = now - request.decoding_seconds, None
        if brought is not None and brought.since is not None:
            # On its way it has got no token.
            since = brought.since
            place = member.place_of(brought.saved - (now - brought.at), now)
        member.found(request.request_id, tokens, since, now, place)
    elif request.prefilled:
        _waits_to_decode(member, request, expected, now)
    else:
        _admit(member, request, rules, expected, now)


def _admit(member: MacroMember, request: RollingRequest, rules: RollingRules, expected: int, now: float) -> None:
    tokens = promise(request.tokens, request.max_tokens, member.capacity, expected)
    member.admitted(request.request_id, tokens, rules.prefill_seconds(request.tokens), now)


def _waits_to_decode(member: MacroMember, request: RollingRequest, expected: int, now: float) -> None:
    tokens = promise(request.tokens, request.max_tokens, member.capacity, expected)
    member.admitted(request.request_id, tokens, 0.0, now)
    member.prefilled(request.request_id, now)
