"""Messages within one unit: gateway, unit scheduler, engines, controller.

A request is known by `request_id` for its whole life. Two counters tell its lives apart:

* `attempt` is counted by the gateway. It grows each time the gateway submits the request again because the process
  that held it died. Tokens of an older attempt are dropped.
* `incarnation` is counted by the unit scheduler. It grows each time the request is admitted to an engine, so that an
  engine never sees the same internal id twice.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from muxserve.costs.steps import StepSums
from muxserve.replicas.priorities import ServiceClass
from muxserve.wire.base import Count, Message, Seconds


class Cause(StrEnum):
    """What an engine's failure says about the requests that it was computing: its own `crash` (an exception, a signal
    of its own making, a hang) that one of them may be the cause of; a `kill` from outside, which hardly any request
    is; nothing."""

    NONE = ""
    KILL = "kill"
    CRASH = "crash"


class Failures(msgspec.Struct, omit_defaults=True, gc=False, frozen=True):
    """How often engines failed while they computed a request: crashes and kills; of these, those while it ran alone.

    `cleared` counts how often it was suspected, and ran alone without a failure. `tokens` are the output tokens that it
    had when it was last submitted. The gateway keeps it with the request; the unit schedulers write it
    (`muxserve.scheduling.quarantine`).
    """

    crashes: Count = 0
    kills: Count = 0
    crashes_alone: Count = 0
    kills_alone: Count = 0
    cleared: Count = 0
    tokens: Count = 0


class RequestSpec(msgspec.Struct, omit_defaults=True, gc=False, frozen=True):
    """What a request asks for, in all of its attempts. `body` is vLLM's own msgpack encoding of its
    `EngineCoreRequest`. A unit tells the gateway what a `traced` request went through (`RequestTrace`)."""

    model: str
    body: bytes
    prompt_tokens: Count
    max_tokens: Count
    service: ServiceClass = ServiceClass()
    traced: bool = False


class HandOff(msgspec.Struct, omit_defaults=True, gc=False, frozen=True):
    """Blocks of a request that wait in the memory manager under `key`; they hold the KV of its first `computed_tokens`
    tokens. Blocks that came by migration (`foreign`) are in no prefix index yet."""

    key: str
    computed_tokens: Count
    foreign: bool = False


# ---------------------------------------------------------------- gateway -> unit scheduler


class GatewayHello(Message):
    """First message of a gateway. `epoch` is fresh per gateway process; `reply_to` is the ZeroMQ address on which the
    gateway's PULL socket takes tokens from engines; `gateway` is its number among the fleet's gateways, which the one
    that is started in its place has again; `pid` is its process, on the controller's machine."""

    epoch: str
    reply_to: str
    gateway: Count = 0
    pid: Count = 0


class Submit(Message):
    """A request to serve. `output_tokens` are the tokens already sent to the client; they stay output tokens when the
    request is prefilled again."""

    request_id: str
    attempt: Count
    request: RequestSpec
    arrival: Seconds
    output_tokens: list[int] = []
    failures: Failures = Failures()


class Cancel(Message):
    """The client went away, a stop string was found, or the request is served elsewhere by now; the pages must come
    back within one step.

    `attempts` has for each request the last attempt that is meant: a later one, which may have come to the unit by
    migration before these words did, goes on. Without, whichever there is ends.
    """

    request_ids: list[str]
    attempts: list[int] = []


# ---------------------------------------------------------------- unit scheduler -> gateway


class UnitHello(Message):
    """Answer to `GatewayHello`, also sent to gateways that greet a restarted unit. A new `epoch` means that the unit
    scheduler lost its queues: the gateway submits everything unfinished again."""

    epoch: str


class Lost(Message):
    """The process that held these requests died. The gateway submits them again with `attempt + 1`, unless they are
    with another unit by now (`TookOver`): a unit says this some time after each request that it gave to another, for
    the case that the other one died before it could speak. `attempts` are those that were lost, one for each id: the
    next one may be on its way to the unit already, and goes on. `failures`, one for each id if there are any, are to be
    submitted with the next attempt."""

    request_ids: list[str]
    attempts: list[Count]
    reason: str
    failures: list[Failures] = []


class RequestFailed(Message):
    """The request makes engines fail, and is not tried again; `message` is for the user."""

    request_id: str
    attempt: Count
    message: str


class TraceStage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request began to go through `ago` seconds before this message: queue, prefill (one for each lease),
    hand_over, decode, move."""

    name: str
    ago: Seconds


class RequestTrace(Message):
    """What a traced request went through in a unit, which it has left now: one stage after the other."""

    request_id: str
    attempt: Count
    moves: Count
    stages: list[TraceStage]


class Refused(Message):
    """The request can never be served; `message` is for the user."""

    request_id: str
    attempt: Count
    message: str


# ---------------------------------------------------------------- unit scheduler -> engine


class Admit(Message):
    """One request entering an engine with a lease.

    With a `hand_off` the engine takes over its blocks. Without it the engine computes everything itself.
    `output_tokens` count as output in penalties, usage, logprobs, stop conditions and structured output.
    """

    request_id: str
    incarnation: Count
    attempt: Count
    gateway_epoch: str
    reply_to: str
    body: bytes
    output_tokens: list[int] = []
    hand_off: HandOff | None = None


class Lease(Message):
    """Permission to run up to `steps` steps within `seconds` from receipt, whichever ends first.

    A lease replaces the one before, with all that was left of it. `tokens` bounds the tokens of one step (0: the
    engine's own bound). An engine reports after every step; the unit scheduler renews while it wants the engine to go
    on. `phase` is for engines of both phases: the one they do under this lease (prompts wait for `prefill`, sequences
    that have their first token for `decode`), or `both` in every step. With `alone`, the id of a request, the engine
    steps nothing else under this lease, and the lease is over when the request is no longer in it.

    `share` is the part of the unit's compute, in millionths, on which steps under this lease are to run (0: whatever
    the engine has). An engine that takes a lease of a smaller share than the one before reports at once, without a
    step: the remaining part is free then. `region` is the part of each GPU's SMs that the steps may use: those of the
    share, and, since decode engines have theirs in common, those of the decode engines that hold a lease beside this
    one.
    """

    lease_id: Count
    steps: Count
    seconds: Seconds
    admit: list[Admit] = []
    tokens: Count = 0
    phase: Literal["prefill", "decode", "both"] = "both"
    alone: str = ""
    share: Count = 0
    region: Count = 0


class Abort(Message):
    """Drop these requests now, between two steps, and give their pages back. With `incarnations`, one for each, only
    these lives of them; without, the last one that the engine took in."""

    request_ids: list[str]
    incarnations: list[int] = []


class ShowRequests(Message):
    """Asks an engine which requests it has."""


class Reset(Message):
    """Drop every request: the unit scheduler is new (`epoch`) and knows none of them."""

    epoch: str


class Stop(Message):
    """Leave at once."""


# ---------------------------------------------------------------- engine -> unit scheduler


class EngineHello(Message):
    """First message of an engine, repeated until answered by `Reset`. The DEALER's identity is `model/phase`."""

    model: str
    phase: str
    pid: int


class HandOver(Message):
    """A prefill engine is done with a request: its blocks wait in the memory manager under `key`.

    `output_tokens` is what the request has generated so far (at least the first token); `computed_tokens` of
    prompt + output have their KV in the blocks.
    """

    request_id: str
    incarnation: Count
    key: str
    blocks: Count
    computed_tokens: Count
    output_tokens: list[Count]


class Prefilled(Message):
    """An engine of both phases has the first token of a request, which stays in it and decodes from here on.

    `output_tokens` is what the request has generated so far (at least the first token)."""

    request_id: str
    incarnation: Count
    output_tokens: list[Count]


class Returned(Message):
    """A decode engine preempted the request (no page was left for it): it must be prefilled again, before others."""

    request_id: str
    incarnation: Count
    output_tokens: list[Count]


class EngineLost(Message):
    """The engine dropped these requests because its memory manager died; `reason` says so in words."""

    request_ids: list[str]
    reason: str


class StepFailed(Message):
    """A step raised an exception, `reason` in words, and the engine goes on: it dropped the requests that were in the
    step, and its lease. Incarnations belong to the ids in order. `lost` are requests that it had to drop as well."""

    request_ids: list[str]
    incarnations: list[Count]
    reason: str
    lost: list[str] = []


class HeldRequests(Message):
    """Answer to `ShowRequests`: the requests that the engine goes on with, after it has taken in lease `lease_id` and
    reported everything that happened before. Incarnations belong to the ids in order."""

    lease_id: Count
    request_ids: list[str]
    incarnations: list[Count]


class StepReport(Message):
    """What an engine did since its last report: `steps` steps, with `seconds` and `tokens` of all of them.

    Without a step (requests that were cancelled or could not be run) all three are 0. `running` and `waiting` count the
    requests left in the engine; `lease_left` the steps left of lease `lease_id`. `finished` lists (request id) of those
    that ended here, for whatever reason. An engine of both phases says in `prefill_tokens` and `prefill_seconds` how
    much of this was prefill: with a lease of one phase all or nothing, else tokens only. `bubbles` are seconds of each
    stage of a pipeline, since the last report, in which it did not compute although a micro-batch was in flight, and
    `computed` those in which it did; empty with one stage. `prefills` and `decodes` are what the steps consisted of:
    those with prompts in them, and the others.
    """

    lease_id: Count
    lease_left: int
    seconds: Seconds
    tokens: Count
    running: Count
    waiting: Count
    finished: list[str] = []
    handed: list[HandOver] = []
    returned: list[Returned] = []
    steps: Count = 1
    prefilled: list[Prefilled] = []
    prefill_tokens: Count = 0
    prefill_seconds: Seconds = 0.0
    bubbles: list[Seconds] = []
    computed: list[Seconds] = []
    prefills: StepSums | None = None
    decodes: StepSums | None = None


# ---------------------------------------------------------------- controller or gateway <-> unit scheduler


class EngineDown(Message):
    """The controller saw the engine die whose process was `pid`; 0: it had none yet.

    The engine that is started in its place greets over a connection of its own, so that a unit scheduler which is late
    may hear the greeting first.
    """

    model: str
    phase: str
    reason: str
    cause: Cause = Cause.NONE
    pid: Count = 0


class Degraded(Message):
    """The controller's host: `model` cannot be served here for now, and is tried again in `retry_in` seconds; nobody
    should wait for that. Over when all its engines are up.

    The unit scheduler passes it on to gateways, and says by a `reason` that is empty that it is over.
    """

    model: str
    reason: str
    retry_in: Seconds = 0.0


class EngineSuspect(Message):
    """The controller has no sign of life of the engine (`on`), or has it again. Meanwhile it gets no new work; if that
    goes on, it is killed, and there is an `EngineDown`. `pid` is its process, as there."""

    model: str
    phase: str
    on: bool
    pid: Count = 0


class GatewayDown(Message):
    """The controller saw gateway number `gateway` die, whose process was `pid`: every request of that gateway is
    cancelled. The next one of that number may have greeted already."""

    gateway: Count = 0
    pid: Count = 0


class Retire(Message):
    """The controller takes the replica of `model` out of service: its engines are stopped next. What waits is given
    back (`Elsewhere`), and its pages are lent to the unit's other models. Sent when the replica has been drained;
    engines that end afterwards cost whatever was still in them, as `EngineDown` says."""

    model: str


class Revive(Message):
    """The controller puts the replica of `model` back into service. Sent before its engines are started, since they
    need pages to warm up."""

    model: str


class Joined(Message):
    """The controller has written the unit's file anew: it has models more, which the memory manager knows already, and
    quotas and shares that were planned for all of them. `Revive` puts a new model into service."""


class StateRequest(Message):
    """Asks for a `StateReply`."""


class StateReply(Message):
    """The unit as JSON-ready data, for `/fleet`, `/metrics` and `muxserve status`."""

    state: dict[str, object]


class TimelineRequest(Message):
    """Asks for a `TimelineReply`: the jobs and moves after `since`, seconds of the unit's clock."""

    since: Seconds = 0.0


class ComputedJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Steps of one engine, end to end, under leases of one `share` (0 to 1).

    `start` and `end` are seconds of the unit's clock; `number` is counted by the unit scheduler. One that goes on comes
    again, longer, under the same number."""

    number: Count
    model: str
    phase: str
    share: float
    start: float
    end: float
    steps: Count
    tokens: Count


class MovedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request of `model` went to unit `destination` at `at` of the unit's clock; it stood still for `seconds`."""

    at: float
    model: str
    destination: str
    seconds: float


class TimelineReply(Message):
    """`now` is the unit's clock when this was said, and `epoch` whose numbers these are."""

    epoch: str
    now: Seconds
    jobs: list[ComputedJob]
    moves: list[MovedRequest]


# ---------------------------------------------------------------- engine -> gateway


class TokensHeader(Message):
    """First frame of a token message; the frames after it are vLLM's msgpack encoding of one `EngineCoreOutputs`.

    `entries` has one `(request_id, attempt, offset)` per output, in order. `offset` counts the request's output tokens
    before the first one in the message. By it the gateway orders messages of several engines and drops tokens that it
    has seen. `engine` is 0 for the prefill engine, and 1 for the decode engine or one of both phases.
    """

    gateway_epoch: str
    model: str
    engine: Count
    entries: list[tuple[str, Count, Count]]
