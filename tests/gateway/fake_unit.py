"""A unit without models: it speaks the unit's side of the messages and plays engines whose tokens the prompt dictates.

A prompt that contains `PLAY {"say": "hello", ...}` is answered with these bytes and an end token, the first token from
the prefill engine, the others from the decode engine, one message each. More keys make things go wrong:

    hold: n        stop after n tokens until told to go on
    lose: n        on the first attempt, say after n tokens that the engine died
    always_lost    say so at once, on every attempt
    restart: n     on the first attempt, be replaced by a new unit scheduler after n tokens
    swap           send everything else before the first token
    overlap        send each token twice, the second time together with the next one
    skip: n        on the first id, never send token n
    abort: n       on the first id, finish with reason "abort" after n tokens
    forget: n      the first time, believe after n tokens that it is finished
    error: n       finish with reason "error" after n tokens
    odd: n         send logprobs that are none with token n
    refuse: text   refuse the request
    drain          on the first attempt, give it back because the unit is drained
    move: [n, u]   on the first attempt, be at unit u from token n on
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from muxserve import spec
from muxserve.net import sockets
from muxserve.wire import (
    Cancel,
    ComputedJob,
    Elsewhere,
    GatewayHello,
    Lost,
    Message,
    Refused,
    RequestTrace,
    StateReply,
    StateRequest,
    Submit,
    TimelineReply,
    TimelineRequest,
    TokensHeader,
    TookOver,
    TraceStage,
    UnitHello,
    decode,
    encode,
)
from tests.support.tiny_checkpoint import SPECIAL_TOKENS, byte_token, token_byte

# Its clock, which stands still.
NOW = 100.0
END = SPECIAL_TOKENS.index("<|im_end|>")


@dataclass
class Play:
    """A request being played."""

    submit: Submit
    request: EngineCoreRequest
    gateway: bytes
    script: dict[str, Any]
    tokens: list[int]
    at: int
    first_id: bool
    queued: list[tuple[int, EngineCoreOutputs, int]] = field(default_factory=list)
    sent: int = 0


class FakeUnit:
    """One unit scheduler and all its engines."""

    def __init__(
        self, path: str, context: zmq.Context[Any], control: socket.socket, units: dict[str, FakeUnit]
    ) -> None:
        self.units = units
        self.unit_spec = spec.load(path)
        self.context = context
        self.control = control
        self.generation = 0
        self.state: dict[str, Any] = {}
        self.gateways: dict[bytes, tuple[str, str]] = {}
        self.plays: dict[str, Play] = {}
        self.played: set[str] = set()
        self.pushes: dict[str, zmq.Socket[bytes]] = {}
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreRequest)
        self.router = self.bind()

    # ------------------------------------------------------------ its sockets

    @property
    def epoch(self) -> str:
        return f"unit-{self.generation}"

    def bind(self) -> zmq.Socket[bytes]:
        router = self.context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        sockets.bind_local(router, self.unit_spec.unit_address)
        return router

    def stop(self) -> None:
        """Forget everything and be gone, as a unit scheduler that is killed."""
        self.router.close()
        for push in self.pushes.values():
            push.close()
        self.pushes.clear()
        self.generation += 1
        self.plays.clear()
        self.gateways.clear()

    def restart(self) -> None:
        """Be replaced by a new unit scheduler."""
        if not self.router.closed:
            self.stop()
        self.router = self.bind()

    def tell(self, event: str, **fields: Any) -> None:
        self.control.send(json.dumps({"event": event, "unit": self.unit_spec.unit, **fields}).encode())

    def answer(self, gateway: bytes, message: Message) -> None:
        self.router.send_multipart([gateway, encode(message)])

    def receive(self) -> None:
        generation = self.generation
        while generation == self.generation:
            try:
                gateway, frame = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.handle(gateway, decode(frame))

    # ------------------------------------------------------------ messages

    def handle(self, gateway: bytes, message: object) -> None:
        match message:
            case GatewayHello():
                self.gateways[gateway] = (message.epoch, message.reply_to)
                self.answer(gateway, UnitHello(self.epoch))
                self.tell("hello", epoch=message.epoch)
            case Submit():
                self.submit(gateway, message)
            case Cancel():
                for request_id in message.request_ids:
                    self.plays.pop(request_id, None)
                self.tell("cancel", ids=message.request_ids)
            case StateRequest():
                self.answer(gateway, StateReply(self.state))
            case TimelineRequest():
                models = [model.name for model in self.unit_spec.models]
                jobs = [
                    ComputedJob(
                        1,
                        model=models[0],
                        phase="prefill",
                        share=0.5,
                        start=NOW - 2.0,
                        end=NOW - 1.5,
                        steps=1,
                        tokens=20,
                    ),
                    ComputedJob(
                        2, model=models[-1], phase="decode", share=0.25, start=NOW - 1.0, end=NOW, steps=4, tokens=4
                    ),
                ]
                self.answer(gateway, TimelineReply(self.epoch, NOW, jobs if message.since < NOW else [], []))

    def submit(self, gateway: bytes, message: Submit) -> None:
        request: EngineCoreRequest = self.decoder.decode(message.request.body)
        text = bytes(token_byte(t) for t in request.prompt_token_ids or () if t >= len(SPECIAL_TOKENS)).decode(
            errors="replace"
        )
        _, played, marked = text.rpartition("PLAY ")
        script = json.JSONDecoder().raw_decode(marked)[0] if played else {"say": "ok"}
        params = request.sampling_params
        assert params is not None
        self.tell(
            "submit",
            id=message.request_id,
            attempt=message.attempt,
            model=message.request.model,
            prompt_tokens=message.request.prompt_tokens,
            max_tokens=message.request.max_tokens,
            output_tokens=message.output_tokens,
            body_id=request.request_id,
            **msgspec.structs.asdict(message.request.service),
            body_priority=request.priority,
            cache_salt=request.cache_salt,
            structured=params.structured_outputs is not None,
            script=script,
        )
        if message.request.traced:
            stages = [TraceStage("queue", 0.02), TraceStage("prefill", 0.01)]
            self.answer(gateway, RequestTrace(message.request_id, message.attempt, 0, stages))
        if "refuse" in script:
            self.answer(gateway, Refused(message.request_id, message.attempt, script["refuse"]))
            return
        if script.get("drain") and message.attempt == 0:
            self.answer(gateway, Elsewhere([message.request_id], [message.attempt]))
            return
        tokens = [byte_token(b) for b in script.get("say", "ok").encode()] + [END]
        # A replaced request comes under a new id; that it comes with the same words tells it from a new one.
        key = json.dumps(script)
        play = Play(
            message, request, gateway, script, tokens, len(message.output_tokens), first_id=key not in self.played
        )
        self.played.add(key)
        self.plays[message.request_id] = play
        self.play(play)

    # ------------------------------------------------------------ engines

    def play(self, play: Play) -> None:
        script, submit = play.script, play.submit
        first_attempt = submit.attempt == 0
        if script.get("always_lost"):
            self.lose(play)
            return
        while submit.request_id in self.plays:
            at = play.at
            if script.get("hold") == at:
                self.tell("held", id=submit.request_id)
                return
            if first_attempt and script.get("move", [None])[0] == at:
                self.flush(play)
                self.move(play, self.units[script.pop("move")[1]])
                return
            if first_attempt and script.get("lose") == at:
                self.flush(play)
                self.lose(play)
                return
            if first_attempt and script.get("restart") == at:
                self.flush(play)
                self.restart()
                return
            if play.first_id and script.get("forget") == at:
                break
            if script.get("error") == at:
                self.emit(play, [], FinishReason.ERROR)
                break
            if play.first_id and script.get("abort") == at:
                self.emit(play, [], FinishReason.ABORT)
                break
            token = play.tokens[at]
            finish = None
            if token == END:
                finish = FinishReason.STOP
            elif at + 1 == submit.request.max_tokens:
                finish = FinishReason.LENGTH
            self.emit(play, [token], finish)
            if finish is not None:
                break
        self.flush(play)
        self.plays.pop(submit.request_id, None)

    def move(self, play: Play, destination: FakeUnit) -> None:
        """Let `destination` go on with it."""
        del self.plays[play.submit.request_id]
        destination.plays[play.submit.request_id] = play
        destination.answer(play.gateway, TookOver(play.submit.request_id, play.submit.attempt, 1))
        destination.play(play)

    def lose(self, play: Play) -> None:
        self.plays.pop(play.submit.request_id, None)
        self.answer(play.gateway, Lost([play.submit.request_id], [play.submit.attempt], "the engine was killed"))

    def emit(self, play: Play, tokens: list[int], finish: FinishReason | None) -> None:
        """Send, or queue if they are to be sent in another order, these next tokens."""
        script, offset = play.script, play.at
        first = play.sent == 0
        both = self.unit_spec.model(play.submit.request.model).engines == ("both",)
        engine = 0 if first and not both else 1
        play.sent += 1
        play.at += len(tokens)
        if play.first_id and script.get("skip") == offset:
            return
        if script.get("overlap") and offset > len(play.submit.output_tokens):
            offset -= 1
            tokens = [play.tokens[offset], *tokens]
        params = play.request.sampling_params
        assert params is not None
        output = EngineCoreOutput(request_id=play.submit.request_id, new_token_ids=tokens, finish_reason=finish)
        if params.logprobs is not None and tokens:
            output.new_logprobs = logprobs_of(tokens, params.logprobs)
            if script.get("odd") == play.at:
                output.new_logprobs = LogprobsLists(*(np.array(0),) * 3, None)
        if first:
            prompt = play.request.prompt_token_ids or []
            output.prefill_stats = PrefillStats(
                num_prompt_tokens=len(prompt), num_computed_tokens=len(prompt) - 1, num_cached_tokens=1,
                num_local_cached_tokens=1,
            )  # fmt: skip
            if params.prompt_logprobs is not None:
                output.new_prompt_logprobs_tensors = prompt_logprobs_of(prompt, params.prompt_logprobs)
        batch = EngineCoreOutputs(
            engine_index=engine,
            outputs=[output],
            scheduler_stats=SchedulerStats(num_running_reqs=1, kv_cache_usage=0.5),
        )
        if script.get("swap"):
            play.queued.append((engine, batch, offset))
        else:
            self.send(play, engine, batch, offset)

    def flush(self, play: Play) -> None:
        for engine, batch, offset in [*play.queued[1:], *play.queued[:1]]:
            self.send(play, engine, batch, offset)
        play.queued.clear()

    def send(self, play: Play, engine: int, batch: EngineCoreOutputs, offset: int) -> None:
        if play.gateway not in self.gateways:
            return
        epoch, reply_to = self.gateways[play.gateway]
        push = self.pushes.get(reply_to)
        if push is None:
            push = self.pushes[reply_to] = self.context.socket(zmq.PUSH)
            push.linger = 0
            sockets.connect(push, reply_to)
        submit = play.submit
        header = TokensHeader(epoch, submit.request.model, engine, [(submit.request_id, submit.attempt, offset)])
        push.send_multipart([encode(header), *self.encoder.encode(batch)])


def logprobs_of(tokens: list[int], count: int) -> LogprobsLists:
    """Logprobs as an engine sends them: of the sampled token, then of the best `count`. Token t has -t/100."""
    rows = [[token, *range(10, 10 + count)] for token in tokens]
    ids = np.array(rows, dtype=np.int32)
    return LogprobsLists(ids, -ids.astype(np.float32) / 100, np.ones(len(tokens), dtype=np.int32), None)


def prompt_logprobs_of(prompt: list[int], count: int) -> LogprobsTensors:
    """Likewise of the prompt's tokens but the first."""
    ids = torch.tensor([[token, *range(10, 10 + count)] for token in prompt[1:]], dtype=torch.int32)
    return LogprobsTensors(ids, -ids.to(torch.float32) / 100, torch.ones(len(prompt) - 1, dtype=torch.int32))


def run(control: socket.socket) -> None:
    """Serve until `control` closes."""
    context: zmq.Context[Any] = zmq.Context()
    units: dict[str, FakeUnit] = {}
    while True:
        poller = zmq.Poller()
        poller.register(control, zmq.POLLIN)
        for unit in units.values():
            if not unit.router.closed:
                poller.register(unit.router, zmq.POLLIN)
        ready = dict(poller.poll())
        for unit in list(units.values()):
            if unit.router in ready:
                unit.receive()
        if control.fileno() in ready:
            try:
                data = control.recv(1 << 20)
            except ConnectionResetError:
                return
            if not data:
                return
            command = json.loads(data)
            match command["op"]:
                case "serve":
                    unit = FakeUnit(command["unit_spec"], context, control, units)
                    units[unit.unit_spec.unit] = unit
                    unit.tell("serving")
                case "state":
                    units[command["unit"]].state = command["state"]
                    units[command["unit"]].tell("state_set")
                case "sync":
                    units[command["unit"]].tell("synced")
                case "down":
                    units[command["unit"]].stop()
                    units[command["unit"]].tell("down")
                case "restart":
                    units[command["unit"]].restart()
                case "go":
                    unit = units[command["unit"]]
                    for play in list(unit.plays.values()):
                        play.script.pop("hold", None)
                        unit.play(play)
