"""A decode engine's batch, and its steps in closed form.

Steps are counted from the engine's start. A *run* is a row of steps of the same batch; each sequence grows by a token
a step, so the work of its first n steps is quadratic in n (`Decode.run`), and so are the moments at which they end.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt

from muxserve.costs import Decode
from muxserve.scheduling.types import ModelProfile
from muxserve.simulator.requests import SimRequest

_FOREVER = 1 << 60


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How the blocks of a sequence are counted: each as 1, with `states` more that hold its state. Or, where pages
    behind a window are given back, each as `block` pages, of which all but the last `seen` blocks (`seen_in_prompt`
    while the prompt is computed) give back `behind`.

    What others may find is counted whole: it is kept, or comes back into use when it is found.
    """

    states: int = 0
    block: int = 1
    behind: int = 0
    seen: int = 0
    seen_in_prompt: int = 0

    @classmethod
    def of(cls, profile: ModelProfile) -> BlockCounts:
        """How the blocks of a model are counted."""
        behind = profile.kv.windowed_pages
        if not behind:
            return cls(profile.kv.state_blocks)
        seen, in_prompt = profile.kv.seen_blocks(1), profile.kv.seen_blocks(profile.engines.max_num_batched_tokens)
        return cls(profile.kv.state_blocks, profile.kv.pages_per_block, behind, seen, in_prompt)

    def held(self, blocks: int, request: SimRequest, prompt: bool = False) -> int:
        """What a sequence holds that has filled so many blocks; `prompt`: while its prompt is computed."""
        count = (blocks + self.states) * self.block
        if self.behind and not request.content:
            count -= max(0, blocks - (self.seen_in_prompt if prompt else self.seen)) * self.behind
        return count


WHOLE_BLOCKS = BlockCounts()


class DecodeBatch:
    """Sequences that decode together.

    `counter` steps have been accounted for; `context` is the tokens that the next one reads, its own included. What
    steps need repeats with a period of `block_tokens` steps: `needs[s % block_tokens]` is the number for step s of
    blocks, as `counts` counts them. A sequence needs less when it has come to fill blocks behind its window; no leap
    goes beyond the step from which on one does.
    """

    __slots__ = (
        "_at",
        "_behind",
        "_ending",
        "_growth",
        "_linear",
        "_nearing",
        "_round",
        "_serial",
        "_work",
        "block_tokens",
        "context",
        "counter",
        "counts",
        "first",
        "floor",
        "generated",
        "needs",
        "running",
        "slow",
        "until",
    )

    def __init__(self, block_tokens: int, first_serial: int = 0) -> None:
        self.block_tokens = block_tokens
        self.counts = WHOLE_BLOCKS
        self.needs = [0] * block_tokens
        # Their sum.
        self._round = 0
        self.running: dict[SimRequest, None] = {}
        self.counter = 0
        self.context = 0
        self.generated = 0
        self._ending: list[tuple[int, int, SimRequest]] = []
        # Sequences that will fill blocks behind their window, and from which step on. Those that do are in the set.
        self._nearing: list[tuple[int, int, SimRequest]] = []
        self._behind: set[SimRequest] = set()
        # Sequences move between batches, so the numbers that say when they joined are different in all of them.
        self._serial = first_serial
        # The run: its first step, the step from which its cost is another; work of n steps = n * (linear + growth * n).
        self.first = 0
        self.until = 0
        self._linear = 0.0
        self._growth = 0.0
        # At time `_at` the work `_work` of the run is done, and `floor` steps; a second of work takes `slow` seconds.
        self._at = 0.0
        self._work = 0.0
        self.floor = 0
        self.slow = 1.0

    # ------------------------------------------------------------ sequences

    def add(self, request: SimRequest) -> None:
        """A sequence joins before the next step, with KV of all its tokens but the last."""
        tokens = request.prompt + request.made
        self._serial += 1
        request.serial = self._serial
        request.base = tokens - 1 - self.counter
        request.ends_at = self.counter + request.output - request.made
        self._needs(request, self.counts.block)
        if self.counts.behind and not request.content:
            # In this step it takes the last block before one goes behind the window.
            last = (self.counts.seen - 1) * self.block_tokens
            heappush(self._nearing, (last + 1 - request.base, request.serial, request))
            self._pass_windows()
        self.context += tokens
        self.running[request] = None
        heappush(self._ending, (request.ends_at, request.serial, request))

    def growth_of(self, request: SimRequest) -> int:
        """What one more block of a sequence counts."""
        return self.counts.block - (self.counts.behind if request in self._behind else 0)

    def remove(self, request: SimRequest) -> int:
        """A sequence leaves before the next step; returns the blocks that it holds."""
        del self.running[request]
        computed = request.base + self.counter
        self._needs(request, -self.growth_of(request))
        self._behind.discard(request)
        self.context -= computed + 1
        request.made = computed + 1 - request.prompt
        request.serial = 0
        return self.counts.held(-(-computed // self.block_tokens), request)

    def next_end(self) -> int:
        """The counter at which the next sequence has its last token, or first needs less for its next block."""
        end = _next(self._ending)
        return min(end, _next(self._nearing)) if self._nearing else end

    def _pass_windows(self) -> None:
        """See which sequences fill blocks behind their windows from the next step on."""
        while _next(self._nearing) <= self.counter:
            _, _, request = heappop(self._nearing)
            self._behind.add(request)
            self._needs(request, -self.counts.behind)

    def _needs(self, request: SimRequest, change: int) -> None:
        self.needs[-request.base % self.block_tokens] += change
        self._round += change

    def ended(self) -> list[SimRequest]:
        """Sequences that have their last token, in the order in which they joined."""
        found = []
        ending, counter = self._ending, self.counter
        while ending and ending[0][0] <= counter:
            _, serial, request = heappop(ending)
            if request.serial == serial:
                found.append(request)
        return found

    def growth(self, first: int, end: int) -> int:
        """Blocks that the steps from `first` up to, not including, `end` need."""
        period = self.block_tokens
        count = end - first
        if count <= 0:
            return 0
        needs = self.needs
        start = first % period
        if count <= period - start:
            return sum(needs[start : start + count])
        rounds, rest = divmod(count, period)
        blocks = rounds * self._round
        end_index = start + rest
        if end_index <= period:
            return blocks + sum(needs[start:end_index])
        return blocks + sum(needs[start:]) + sum(needs[: end_index - period])

    def furthest(self, first: int, end: int, blocks: int) -> int:
        """The last step count up to `end` such that the steps from `first` to there need at most `blocks`."""
        needs, period = self.needs, self.block_tokens
        for step in range(first, end):
            blocks -= needs[step % period]
            if blocks < 0:
                return step
        return end

    def advance(self, counter: int) -> None:
        """Steps up to `counter` are done."""
        tokens = len(self.running) * (counter - self.counter)
        self.context += tokens
        self.generated += tokens
        self.counter = counter
        if self._nearing:
            self._pass_windows()

    # ------------------------------------------------------------ the run

    def begin(self, cost: Decode, now: float) -> None:
        """A run begins now with the next step, at that cost."""
        batch = len(self.running)
        self.first = self.floor = self.counter
        self._growth = cost.per_token * batch / 2
        self._linear = cost.fixed + cost.per_token * self.context - self._growth
        steps = (cost.until - self.context) / batch
        self.until = _FOREVER if steps > _FOREVER else self.counter + max(1, int(steps) + 1)
        self._at = now
        self._work = 0.0

    def resume(self) -> None:
        """The next step follows the last one."""
        self.floor = self.counter

    def time_of(self, counter: int) -> float:
        """When that many steps are done."""
        steps = counter - self.first
        return self._at + (steps * (self._linear + self._growth * steps) - self._work) * self.slow

    def step_seconds(self) -> float:
        """How long the next step takes at the present speed."""
        steps = self.counter - self.first
        return (self._linear + self._growth * (2 * steps + 1)) * self.slow

    def done_by(self, now: float) -> int:
        """Steps that are done at `now`, which is not before the last such moment."""
        # The moments are compared by the very formula of `time_of`; in place, since this is asked most of all.
        at, done, slow, linear, growth, first = self._at, self._work, self.slow, self._linear, self._growth, self.first
        counter = self.floor
        work = done + (now - at) / slow
        if work > 0.0:
            guess = first + int(2.0 * work / (linear + sqrt(linear * linear + 4.0 * growth * work)))
            if guess > counter:
                counter = guess
        steps = counter + 1 - first
        while at + (steps * (linear + growth * steps) - done) * slow <= now:
            steps += 1
        counter = first + steps - 1
        while counter > self.floor and self.time_of(counter) > now:
            counter -= 1
        return counter

    def retime(self, slow: float, now: float) -> None:
        """From now on work takes `slow` times as long as alone; the step under way is stretched from here."""
        self.floor = self.done_by(now)
        self._work += (now - self._at) / self.slow
        self._at = now
        self.slow = slow


def _next(moments: list[tuple[int, int, SimRequest]]) -> int:
    """The earliest step of a heap whose sequence is still there as it was; others are dropped."""
    while moments:
        head = moments[0]
        if head[2].serial == head[1]:
            return head[0]
        heappop(moments)
    return _FOREVER
