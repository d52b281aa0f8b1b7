"""A request in the simulator."""

from __future__ import annotations

from muxserve.metrics.records import RequestRecord
from muxserve.simulator.block_keys import Key
from muxserve.workload.trace import Content, TraceRequest


class SimRequest:
    """One request from arrival to end. `made` counts its output tokens so far, `computed` the tokens whose KV a prefill
    has computed, `blocks` those that its prompt holds. `lease_id` is the ticket with which it came into its present
    engine, `unit` the name of the unit that has it. Its `output` is 0 if it asks for vectors, which come in place of a
    first token.

    While it decodes, `base` + the engine's step counter is the number of tokens in its KV, `ends_at` the counter at
    which it has its last token, and `serial` its place in the order of joining. In a pipeline, `flying` counts the
    micro-batches that it is in.

    `scheduling` and `execution` are the levels of its priorities (empty: the default one), `priority` is its place in
    queues (lower first). `decoding_since` is when its first decode step began: what lies between that and its first
    token is the wait for the phase switch. `lost` sums the seconds from each preemption to the end of the prefill that
    made it good (Llumnix's preemption loss), `down` those in which it was in no batch because it moved, `moves` how
    often it did; while it does, `left` is when it left its batch, and to what the time without one is added.

    `content` is what its prompt consists of, `keys` are those of its full blocks so far, of which the first `published`
    were offered to others; `shared` are those that others may find and it holds. `cached` tokens of its prompt were
    there when it was first prefilled.
    """

    __slots__ = (
        "arrival",
        "base",
        "blocks",
        "cached",
        "computed",
        "content",
        "decoding_since",
        "down",
        "ends_at",
        "error",
        "execution",
        "finish",
        "first_token",
        "flying",
        "keys",
        "lease_id",
        "left",
        "lost",
        "made",
        "model",
        "moves",
        "output",
        "preempted_at",
        "preemptions",
        "priority",
        "prompt",
        "published",
        "request_id",
        "scheduling",
        "serial",
        "shared",
        "tenant",
        "unit",
    )

    def __init__(
        self, request_id: str, model: str, arrival: float, prompt: int, output: int, content: Content = ()
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.arrival = arrival
        self.prompt = prompt
        self.output = output
        self.scheduling = self.execution = self.tenant = ""
        self.priority = 0
        self.unit = ""
        self.made = 0
        self.computed = 0
        self.blocks = 0
        self.lease_id = 0
        self.base = 0
        self.ends_at = 0
        self.serial = 0
        self.flying = 0
        self.first_token: float | None = None
        self.decoding_since: float | None = None
        self.finish: float | None = None
        self.preempted_at: float | None = None
        self.preemptions = 0
        self.left: tuple[float, list[float]] | None = None
        self.lost = 0.0
        self.down = 0.0
        self.moves = 0
        self.error = ""
        self.content = content
        self.keys: list[Key] = []
        self.shared: list[Key] = []
        self.published = 0
        self.cached = 0

    @classmethod
    def of(cls, each: TraceRequest, number: int) -> SimRequest:
        """The `number`-th of a workload."""
        return cls(str(number), each.model, each.arrival, each.prompt_tokens, each.output_tokens, each.content)

    @property
    def tokens(self) -> int:
        """All that it consists of now; a preempted one computes its outputs again, too."""
        return self.prompt + self.made

    @property
    def switch_wait(self) -> float:
        """Seconds from the first token to the begin of the first decode step; 0 for an answer of one token."""
        if self.decoding_since is None or self.first_token is None:
            return 0.0
        return self.decoding_since - self.first_token

    def preempted(self, now: float) -> None:
        """It has lost its pages."""
        self.preemptions += 1
        if self.preempted_at is None:
            self.preempted_at = now

    def adopted(self, now: float) -> None:
        """It is in a batch again."""
        if self.left is not None:
            since, told = self.left
            self.left = None
            self.down += now - since
            told.append(now - since)

    def got_token(self, now: float) -> None:
        """A prefill of all its tokens has made one more, which is with the client at `now`."""
        self.made += 1
        self.computed = 0
        if self.first_token is None:
            self.first_token = now
        if self.preempted_at is not None:
            self.lost += now - self.preempted_at
            self.preempted_at = None

    def record(self) -> RequestRecord:
        """What became of it."""
        return RequestRecord(
            model=self.model,
            arrival=self.arrival,
            prompt_tokens=self.prompt,
            output_tokens=min(self.made, self.output),
            first_token=self.first_token,
            finish=self.finish,
            error=self.error,
            preemptions=self.preemptions,
            cached_tokens=self.cached,
        )
