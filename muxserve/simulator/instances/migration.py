"""One request on its way from one instance to another, in stages, while it goes on decoding (Llumnix, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from muxserve.simulator.instances.instance import STEPPING, Instance
from muxserve.simulator.instances.requests import ReplicaRequest
from muxserve.simulator.instances.setup import MigrationCosts


class Clock(Protocol):
    """What a migration asks of the cluster."""

    def at(self, when: float, callback: Callable[[float], None]) -> None:
        """Call back at that time."""
        ...

    def kick(self, instance: Instance, now: float) -> None:
        """The instance may have something to do; it begins a step unless it is in one."""
        ...

    def moved(self, migration: Migration, arrived: bool, now: float) -> None:
        """The migration has ended."""
        ...


class Migration:
    """Moves `request`. `begin` it; `Clock.moved` is told of its end.

    The KV is append-only, so that what a stage has copied stays right. The request may end, or be preempted, between
    two stages; then the destination gives the blocks back and nothing else has happened.
    """

    def __init__(
        self,
        clock: Clock,
        costs: MigrationCosts,
        token_bytes: float,
        request: ReplicaRequest,
        source: Instance,
        destination: Instance,
    ) -> None:
        self.request = request
        self.source = source
        self.destination = destination
        self.began = self.down_since = 0.0
        self._clock = clock
        self._costs = costs
        self._token_bytes = token_bytes
        self._preemptions = request.preemptions
        self._reserved = 0
        self._copied = 0
        self._stages = 0

    def begin(self, now: float) -> bool:
        """The first stage; False: the destination has no room."""
        self.began = now
        request, source = self.request, self.source
        if not self._reserve(source.computed(request)):
            return False
        request.migration = self
        source.moving_out += 1
        self.destination.moving_in += 1
        self._copy(now)
        return True

    # ------------------------------------------------------------ stages

    def _copy(self, now: float) -> None:
        """Copy what has been computed up to now."""
        computed = self.source.computed(self.request)
        self._stages += 1
        seconds = self._seconds(computed - self._copied)
        self._copied = computed
        self._clock.at(now + seconds, self._stage_ends)

    def _stage_ends(self, now: float) -> None:
        if not self._alive():
            self._end(False, now)
            return
        source, costs = self.source, self._costs
        computed = source.computed(self.request)
        left = source.blocks_of(computed) - self._copied // source.spec.block_tokens
        if left <= costs.last_stage_blocks or self._stages >= costs.max_stages:
            # The sequence can leave only between two steps.
            if source.state == STEPPING:
                source.at_boundary.append(self._last_stage)
            else:
                self._last_stage(now)
        elif self._reserve(computed):
            self._copy(now)
        else:
            self._end(False, now)

    def _last_stage(self, now: float) -> None:
        request, source = self.request, self.source
        if not self._alive():
            self._end(False, now)
            return
        computed = source.computed(request)
        if not self._reserve(computed):
            self._end(False, now)
            return
        blocks = source.leave(request)
        self.down_since = now

        def commit(now: float) -> None:
            source.free += blocks
            self._clock.kick(source, now)
            if self.destination.state == STEPPING:
                self.destination.at_boundary.append(self._arrive)
            else:
                self._arrive(now)

        self._clock.at(now + self._seconds(computed - self._copied) + self._costs.commit, commit)

    def _arrive(self, now: float) -> None:
        request, destination = self.request, self.destination
        destination.reserved -= self._reserved
        self._reserved = 0
        request.down += now - self.down_since
        request.moves += 1
        destination.join(request)
        self._end(True, now)
        self._clock.kick(destination, now)

    # ------------------------------------------------------------ inside

    def _seconds(self, tokens: int) -> float:
        # The link of an instance is shared by those that are in flight there.
        sharing = max(self.source.moving_out, self.destination.moving_in, 1)
        return self._costs.handshake + tokens * self._token_bytes * sharing / self._costs.bandwidth

    def _alive(self) -> bool:
        """The request still decodes on the source."""
        request = self.request
        return request.serial != 0 and request.preemptions == self._preemptions and request.finish is None

    def _reserve(self, computed: int) -> bool:
        """Have blocks for so many tokens at the destination."""
        want = self.destination.blocks_of(computed) - self._reserved
        if want > self.destination.free:
            return False
        self.destination.free -= want
        self.destination.reserved += want
        self._reserved += want
        return True

    def _end(self, arrived: bool, now: float) -> None:
        destination = self.destination
        destination.free += self._reserved
        destination.reserved -= self._reserved
        self._reserved = 0
        self.source.moving_out -= 1
        destination.moving_in -= 1
        self.request.migration = None
        if not arrived:
            self._clock.kick(destination, now)
        self._clock.moved(self, arrived, now)
