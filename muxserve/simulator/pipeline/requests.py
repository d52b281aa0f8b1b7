"""A request in a pipeline, and the micro-batches that carry it."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxserve.simulator.pipeline.stages import Work
from muxserve.simulator.requests import SimRequest


class PipelineRequest(SimRequest):
    """`computed` tokens of its KV are computed or in a micro-batch that is under way, in `blocks` of each stage;
    `flying` counts the micro-batches that it is in. `began` is when its first chunk was put into one."""

    __slots__ = ("began", "flying")

    def __init__(self, request_id: str, model: str, arrival: float, prompt: int, output: int) -> None:
        super().__init__(request_id, model, arrival, prompt, output)
        self.flying = 0
        self.began: float | None = None

    @property
    def tokens(self) -> int:
        """All that it consists of now; a preempted one computes its outputs again, too."""
        return self.prompt + self.made


@dataclass(slots=True)
class MicroBatch:
    """What goes through the stages together. `chunks` are prompts with the tokens of them that are computed here;
    `whole` are those whose prompt ends with it, which get a token by it like the `decodes`."""

    chunks: list[tuple[PipelineRequest, int]] = field(default_factory=list)
    whole: list[PipelineRequest] = field(default_factory=list)
    decodes: list[PipelineRequest] = field(default_factory=list)
    prefill: int = 0
    pairs: int = 0
    context: int = 0

    def add_chunk(self, request: PipelineRequest, tokens: int) -> None:
        """The next `tokens` of a prompt."""
        before = request.computed
        self.chunks.append((request, tokens))
        self.prefill += tokens
        self.pairs += tokens * before + tokens * (tokens + 1) // 2
        request.computed = before + tokens
        request.flying += 1
        if request.computed == request.tokens:
            self.whole.append(request)

    def add_decode(self, request: PipelineRequest) -> None:
        """The next token of a sequence."""
        self.decodes.append(request)
        request.computed += 1
        request.flying += 1
        self.context += request.computed

    @property
    def work(self) -> Work:
        """What the stages have to do for it."""
        return Work(self.prefill, len(self.chunks), self.pairs, len(self.decodes), self.context)
