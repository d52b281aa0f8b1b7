"""The unit's state as its events tell it.

Every event costs a constant amount of work, whatever number of requests is live; only putting a request into a queue
takes logarithmic time. Policies read the ledger and never write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from muxserve.scheduling.journal import Event, Note
from muxserve.scheduling.leases import Leases
from muxserve.scheduling.state import LiveRequest, ModelState, PoolState
from muxserve.scheduling.types import ModelProfile, Phase, Place, PoolProfile, QueuedRequest


class UnitLedger(Leases):
    """Queues, engines, leases, pages and compute of one unit.

    Requests are counted exactly once: they arrive or are taken over from another unit, change places, and leave by
    `finished`, `cancelled`, `given_back`, `moved` or one of the events that lose them, which return what was lost so
    that the caller can tell the gateway.

    Raises:
        ValueError: two models share a name, or a model names an unknown pool.
    """

    def __init__(self, models: Sequence[ModelProfile], pools: Sequence[PoolProfile]) -> None:
        self.pools = {pool.name: PoolState(pool, pool.pages, pool.pages) for pool in pools}
        super().__init__()
        self.memory_up = True
        for index, profile in enumerate(models):
            if profile.name in self.by_name:
                raise ValueError(f"two models are called {profile.name!r}")
            if profile.pool not in self.pools:
                raise ValueError(f"model {profile.name!r} names the unknown pool {profile.pool!r}")
            model = ModelState(index, profile, self.pools[profile.pool])
            self.models.append(model)
            self.by_name[profile.name] = model
            model.pool.models.append(model)

    # ------------------------------------------------------------ requests

    def arrived(self, request: QueuedRequest, now: float) -> LiveRequest:
        """A request joins its model's queue.

        Raises:
            KeyError: no such model.
            ValueError: a live request has that id.
        """
        live = self._enter(request)
        self._note(live, Event.CAME)
        live.model.queue.add(live)
        live.model.tally.arrived += 1
        return live

    def taken_over(self, request: QueuedRequest, now: float) -> LiveRequest:
        """A request came from another unit with its KV, which waits to be adopted by the engine that decodes.

        Raises:
            KeyError: no such model.
            ValueError: a live request has that id.
        """
        live = self._enter(request)
        model = live.model
        live.place = Place.HANDED
        self._note(live, Event.CAME)
        model.handed[request.request_id] = live
        model.seat(live.execution, 1)
        model.tally.moved_in += 1
        self._settle(model.decode, now)
        return live

    def _enter(self, request: QueuedRequest) -> LiveRequest:
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id!r} is live already")
        model = self.by_name[request.model]
        if not model.live:
            model.work_since = request.arrival
        live = LiveRequest(request, model)
        self.requests[request.request_id] = live
        return live

    def cancelled(self, request_id: str, now: float) -> Place | None:
        """A request is not wanted any more. Returns where it was, None if it is not live.

        Its engine may be in the middle of a step: the lease stays until the engine has answered.
        """
        live = self.requests.get(request_id)
        if live is None:
            return None
        place = live.place
        live.model.tally.cancelled += 1
        self._leave(live, now)
        return place

    def given_back(self, request_id: str, now: float) -> bool:
        """A request that waits in its model's queue is to be served by another unit. False: it does not wait."""
        live = self.requests.get(request_id)
        if live is None or live.place is not Place.QUEUED:
            return False
        live.model.tally.given_back += 1
        self._leave(live, now)
        return True

    def handed_over(self, request_id: str, lease_id: int, output_tokens: int, now: float) -> bool:
        """A prefill engine is done with a request that it got with lease `lease_id`. False: it holds no such one."""
        live = self.requests.get(request_id)
        if live is None or live.place is not Place.PREFILLING or live.lease_id != lease_id:
            return False
        model = live.model
        del model.prefilling[request_id]
        model.prefill_tokens -= live.tokens
        live.place = Place.HANDED
        live.output_tokens = output_tokens
        live.lease_id = 0
        model.handed[request_id] = live
        self._settle(model.prefill, now)
        self._settle(model.decode, now)
        return True

    def prefilled(self, request_id: str, lease_id: int, output_tokens: int, now: float) -> bool:
        """An engine of both phases has the first token of a request that it got with lease `lease_id`, and keeps it.
        False: it holds no such one."""
        live = self.requests.get(request_id)
        if live is None or live.place is not Place.PREFILLING or live.lease_id != lease_id or not live.model.both:
            return False
        model = live.model
        del model.prefilling[request_id]
        model.prefill_tokens -= live.tokens
        live.place = Place.DECODING
        live.output_tokens = output_tokens
        live.entered_at = model.rounds
        model.decoding[request_id] = live
        lease = model.decode.lease
        if lease is not None and lease.phase is not Phase.PREFILL:
            live.decoding_since = now
        else:
            model.fresh[request_id] = now
        self._note(live, Event.PREFILLED)
        return True

    def finished(self, request_id: str, phase: Phase, lease_id: int, now: float) -> bool:
        """An engine ended a request, in a step under lease `lease_id`. False: this life of it is not in that engine."""
        live = self.requests.get(request_id)
        if live is None or not 0 < live.lease_id <= lease_id or request_id not in live.model.engine(phase).inside:
            return False
        live.model.tally.finished += 1
        self._leave(live, now, computed=True)
        return True

    def returned(self, request_id: str, lease_id: int, output_tokens: int, now: float) -> bool:
        """An engine gave back a request that it got with lease `lease_id`; it queues again, before others."""
        live = self.requests.get(request_id)
        if live is None or live.lease_id != lease_id or not lease_id:
            return False
        model = live.model
        engine = model.prefill if live.place is Place.PREFILLING else model.decode
        if live.place is Place.PREFILLING:
            del model.prefilling[request_id]
            self._not_prefilled(live)
        else:
            del model.decoding[request_id]
        self._note(live, Event.LEFT)
        self._decodes_no_more(live)
        model.seat(live.execution, -1)
        live.place = Place.QUEUED
        live.lease_id = 0
        live.output_tokens = output_tokens
        live.resumed = True
        live.blocks = model.blocks_of(live.tokens)
        self._note(live, Event.CAME)
        model.queue.add(live)
        model.tally.returned += 1
        self._settle(engine, now)
        return True

    def detached(self, request_id: str, lease_id: int, output_tokens: int, now: float) -> bool:
        """An engine let go of a request that decodes, which it got with lease `lease_id`: it is on its way to another
        unit. False: this life of it is not in that engine; the engine may have nothing left for all that."""
        live = self.requests.get(request_id)
        if live is None or live.place is not Place.DECODING or live.lease_id != lease_id:
            return False
        model = live.model
        del model.decoding[request_id]
        self._decodes_no_more(live)
        live.place = Place.MOVING
        live.output_tokens = output_tokens
        live.lease_id = 0
        model.moving[request_id] = live
        # It answered between two steps, and runs no further one without requests.
        self._settle(model.decode, now, idle=True)
        return True

    def stays(self, request_id: str, now: float) -> bool:
        """A move has come to nothing: the request waits to be adopted by its engine again. False: it was not
        moving."""
        live = self.requests.get(request_id)
        if live is None or live.place is not Place.MOVING:
            return False
        model = live.model
        del model.moving[request_id]
        live.place = Place.HANDED
        model.handed[request_id] = live
        self._settle(model.decode, now)
        return True

    def moved(self, request_id: str, now: float) -> bool:
        """Another unit has the request. False: it was not moving."""
        live = self.requests.get(request_id)
        if live is None or live.place is not Place.MOVING:
            return False
        live.model.tally.moved_out += 1
        self._leave(live, now)
        return True

    def lost(self, request_ids: Iterable[str], now: float) -> list[str]:
        """Requests died with the process that held them. Returns those that were live."""
        gone = []
        for request_id in request_ids:
            live = self.requests.get(request_id)
            if live is not None:
                live.model.tally.lost += 1
                self._leave(live, now, idle=True)
                gone.append(request_id)
        return gone

    def _leave(self, live: LiveRequest, now: float, idle: bool = False, computed: bool = False) -> None:
        """Forget a request; with `idle`, its engine runs no step, and has no use for a lease if that was the last. With
        `computed`, all its tokens were, as far as the step tells that is reported next."""
        model, request_id = live.model, live.request_id
        del self.requests[request_id]
        self._note(live, Event.LEFT)
        self._decodes_no_more(live)
        if live.place is not Place.QUEUED:
            model.seat(live.execution, -1)
        match live.place:
            case Place.QUEUED:
                model.queue.remove(live)
            case Place.PREFILLING:
                del model.prefilling[request_id]
                if computed:
                    model.prefill_tokens -= live.tokens
                else:
                    self._not_prefilled(live)
                self._settle(model.prefill, now, idle)
            case Place.HANDED:
                del model.handed[request_id]
                self._settle(model.decode, now)
            case Place.DECODING:
                del model.decoding[request_id]
                self._settle(model.decode, now, idle)
            case Place.MOVING:
                del model.moving[request_id]
        if not model.live:
            model.work_since = None

    @staticmethod
    def _decodes_no_more(live: LiveRequest) -> None:
        live.decoding_since = None
        if live.model.fresh:
            live.model.fresh.pop(live.request_id, None)

    @staticmethod
    def _note(live: LiveRequest, event: Event) -> None:
        journal = live.model.journal
        if journal is None:
            return
        if event is Event.CAME:
            left = max(1, live.max_tokens - live.output_tokens)
            journal.append(Note(event, live.request_id, live.tokens, left, live.place is Place.HANDED))
        else:
            journal.append(Note(event, live.request_id))

    @staticmethod
    def _not_prefilled(live: LiveRequest) -> None:
        """`live` will not be prefilled, or not now; what is still promised is at most what the others need."""
        model = live.model
        model.prefill_tokens -= live.tokens
        model.promise(min(model.outstanding, model.prefill_tokens))

    # ------------------------------------------------------------ engines

    def engine_up(self, name: str, phase: Phase, now: float) -> list[str]:
        """An engine is ready and empty. Returns the requests that it was thought to hold, which are lost."""
        gone = self.engine_down(name, phase, now, hand_offs=False)
        engine = self.by_name[name].engine(phase)
        engine.up = True
        self._settle(engine, now)
        return gone

    def engine_down(self, name: str, phase: Phase, now: float, hand_offs: bool = True) -> list[str]:
        """An engine died: its lease is free and what it held is lost, with `hand_offs` also what waited to enter it.

        Hand-offs that a dead prefill engine has made survive it. Returns the lost requests.
        """
        engine = self.by_name[name].engine(phase)
        engine.up = engine.suspect = False
        self._end_lease(engine)
        engine.fed()
        engine.of(Phase.PREFILL).fed()
        engine.entered_with = 0
        gone = self.lost([*engine.inside, *(engine.incoming if hand_offs else ())], now)
        self._settle(engine, now)
        return gone

    def engine_suspect(self, name: str, phase: Phase, on: bool) -> None:
        """An engine gives no signs of life, or gives them again; what it has stays with it. One that is not up is not
        suspected of anything."""
        engine = self.by_name[name].engine(phase)
        engine.suspect = on and engine.up

    # ------------------------------------------------------------ pages

    def pages(self, name: str, used: int, cached: int, quota: int) -> None:
        """The memory manager's counts of one model: pages held (owned or handed off), cached, and its quota."""
        model = self.by_name[name]
        if (used < model.used or quota > model.quota) and used < quota:
            # A page came free: whoever waits for one need not wait longer.
            model.prefill.retry_at = model.decode.retry_at = model.decode.of(Phase.PREFILL).retry_at = 0.0
        model.used = used
        model.cached = cached
        model.quota = quota
        if used > model.peak:
            model.peak = used

    def pool_pages(self, name: str, free: int, cached: int) -> None:
        """The memory manager's counts of one pool: pages free and pages cached, which it evicts when needed."""
        pool = self.pools[name]
        pool.free = free
        pool.available = free + cached
