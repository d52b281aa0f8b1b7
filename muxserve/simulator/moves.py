"""One request on its way from one unit to another, in stages, while it goes on decoding (Llumnix, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muxserve.simulator.clock import Clock
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.job import STEPPING
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.scheduler import LeaseScheduler


@dataclass(frozen=True, slots=True)
class MigrationCosts:
    """Live migration in stages.

    A stage asks the destination for blocks (`handshake` seconds) and copies what the sequence has made since the last
    one at `bandwidth` bytes per second. When a stage has left at most `last_stage_blocks` to copy, or after
    `max_stages`, the sequence leaves the batch, the rest is copied, and `commit` seconds later it is at the
    destination. A migration that does not get its blocks is given up.

    The defaults: Llumnix ran on VMs with 64 Gb/s between them, and copied through host memory with Gloo (sections 5 and
    6.1), for which half of that is taken. Downtimes of 20 to 30 ms in its figure 10 are a step under way plus the last
    stage. Stages are as in its release (`--migration-max-stages`, `--migration-last-stage-max-blocks`). What a round
    trip and a commit take is assumed.
    """

    bandwidth: float = 4e9
    handshake: float = 0.001
    commit: float = 0.002
    last_stage_blocks: int = 16
    max_stages: int = 3

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"the bandwidth must be above zero bytes per second, not {self.bandwidth}")
        if self.handshake < 0 or self.commit < 0:
            raise ValueError("handshake and commit must be zero or positive seconds")
        if self.last_stage_blocks < 1 or self.max_stages < 1:
            raise ValueError("last_stage_blocks and max_stages must be at least 1")


class SimulatedMove:
    """Moves `request`, which decodes. `begin` it; `ended` is told whether it has arrived, `downtimes` gets how long it
    was in no batch.

    The KV is append-only, so that what a stage has copied stays right. A state, which each step overwrites, is copied
    in the first stage, and again in the last. The request may end, or be preempted, between two stages; then the
    destination gives the blocks back and nothing else has happened.
    """

    def __init__(
        self,
        clock: Clock,
        costs: MigrationCosts,
        request: SimRequest,
        source: LeaseScheduler,
        destination: LeaseScheduler,
        ended: Callable[[SimulatedMove, bool, float], None],
        downtimes: list[float],
    ) -> None:
        self.request = request
        self.source = source
        self.destination = destination
        self.began = 0.0
        self._clock = clock
        self._costs = costs
        self._ended = ended
        self._downtimes = downtimes
        self._engine = source.decoder(request.model)
        model = self._engine.model
        self._block_tokens = model.profile.kv.block_tokens
        self._token_bytes = float(model.architecture.kv_bytes_per_token(model.dtype))
        self._state_bytes = float(model.architecture.state_bytes(model.dtype))
        self._counts = self._engine.pages.counts
        self._lease_id = request.lease_id
        self._preemptions = request.preemptions
        self._reserved = 0
        self._copied = 0
        self._stages = 0

    def begin(self, now: float) -> bool:
        """The first stage; False: the destination has no room."""
        self.began = now
        if not self._reserve(now):
            return False
        self.source.moving_out += 1
        self.destination.moving_in += 1
        self._copy(now)
        return True

    # ------------------------------------------------------------ stages

    def _copy(self, now: float) -> None:
        """Copy what has been computed up to now."""
        computed = self._engine.computed(self.request, now)
        self._stages += 1
        seconds = self._seconds(computed - self._copied, state=self._stages == 1)
        self._copied = computed
        self._clock.at(now + seconds, _StageCopied(self))

    def stage_copied(self, now: float) -> None:
        """The blocks that were computed before the stage are at the destination."""
        if not self._alive():
            self._end(False, now)
            return
        costs, size = self._costs, self._block_tokens
        left = -(-self._engine.computed(self.request, now) // size) - self._copied // size
        if left <= costs.last_stage_blocks or self._stages >= costs.max_stages:
            self._between_steps(now)
        elif self._reserve(now):
            self._copy(now)
        else:
            self._end(False, now)

    def _between_steps(self, now: float) -> None:
        """The sequence can leave only between two steps, and when it is in no micro-batch."""
        engine = self._engine
        if engine.state == STEPPING or engine.in_flight(self.request):
            engine.calls.append(self._last_stage)
            engine.interrupt(now)
        else:
            self._last_stage(now)

    def _last_stage(self, now: float) -> None:
        request = self.request
        if not self._alive():
            self._end(False, now)
            return
        if self._engine.in_flight(request):
            self._engine.calls.append(self._last_stage)
            return
        if not self._reserve(now):
            self._end(False, now)
            return
        computed = self._engine.computed(request, now)
        blocks = self.source.detach(request, now)
        request.left = now, self._downtimes
        seconds = self._seconds(computed - self._copied, state=True)
        self._clock.at(now + seconds + self._costs.commit, _Committed(self, blocks))

    def committed(self, blocks: int, now: float) -> None:
        """All is at the destination; the source has the request's `blocks` no longer."""
        request = self.request
        self.source.moved(request, blocks, now)
        request.moves += 1
        request.blocks, self._reserved = self._reserved, 0
        self.destination.take_over(request, now)
        self._end(True, now)

    # ------------------------------------------------------------ inside

    def _seconds(self, tokens: int, state: bool) -> float:
        # The link of a unit is shared by those that are in flight there.
        sharing = max(self.source.moving_out, self.destination.moving_in, 1)
        size = tokens * self._token_bytes + state * self._state_bytes
        return self._costs.handshake + size * sharing / self._costs.bandwidth

    def _alive(self) -> bool:
        """The request still decodes on the source."""
        request = self.request
        return (
            request.finish is None and request.preemptions == self._preemptions and request.lease_id == self._lease_id
        )

    def _reserve(self, now: float) -> bool:
        """Have blocks for what is computed at the destination."""
        filled = -(-self._engine.computed(self.request, now) // self._block_tokens)
        want = self._counts.held(filled, self.request) - self._reserved
        if want > 0:
            if not self.destination.reserve(self.request.model, want, now):
                return False
            self._reserved += want
        return True

    def _end(self, arrived: bool, now: float) -> None:
        if self._reserved:
            self.destination.reserve(self.request.model, -self._reserved, now)
            self._reserved = 0
        self.source.moving_out -= 1
        self.destination.moving_in -= 1
        self._ended(self, arrived, now)


@dataclass(slots=True)
class _StageCopied(TimedEvent):
    """A stage of a move is over."""

    move: SimulatedMove

    def handle(self, now: float) -> None:
        self.move.stage_copied(now)


@dataclass(slots=True)
class _Committed(TimedEvent):
    """A move is over; the request had so many blocks at its source."""

    move: SimulatedMove
    blocks: int

    def handle(self, now: float) -> None:
        self.move.committed(self.blocks, now)
