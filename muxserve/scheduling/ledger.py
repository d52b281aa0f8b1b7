"""The unit's state as its events tell it.

Every event costs a constant amount of work, whatever number of requests is live; only putting a request into a queue
takes logarithmic time. Policies read the ledger and never write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from muxserve.scheduling.leases import LeaseState
from muxserve.scheduling.state import EngineState, Event, LiveRequest, ModelState, Note, PoolState
from muxserve.scheduling.types import (
    BOTH,
    DECODE,
    DECODING,
    HANDED,
    MOVING,
    PREFILL,
    PREFILLING,
    QUEUED,
    WHOLE,
    Grant,
    ModelProfile,
    Phase,
    PoolProfile,
    QueuedRequest,
    RequestPlace,
    StepsDone,
)


class UnitLedger:
    """Queues, engines, leases, pages and compute of one unit.

    Requests are counted exactly once: they arrive or are taken over from another unit, change places, and leave by
    `finished`, `cancelled`, `given_back`, `moved` or one of the events that lose them, which return what was lost so
    that the caller can tell the gateway.

    Raises:
        ValueError: two models share a name, or a model names an unknown pool.
    """

    def __init__(self, models: Sequence[ModelProfile], pools: Sequence[PoolProfile]) -> None:
        self.pools = {pool.name: PoolState(pool, pool.pages, pool.pages) for pool in pools}
        self.models: list[ModelState] = []
        self.by_name: dict[str, ModelState] = {}
        self.requests: dict[str, LiveRequest] = {}
        self.share_used = 0
        self.memory_up = True
        for profile in models:
            if profile.name in self.by_name:
                raise ValueError(f"two models are called {profile.name!r}")
            self._enter_model(profile)

    def join(self, profiles: Sequence[ModelProfile]) -> list[ModelState]:
        """The unit's models are these from now on: all that it has, as they are planned now, and new ones, which are
        returned.

        Raises:
            ValueError: a new model names an unknown pool.
        """
        new = []
        for profile in profiles:
            known = self.by_name.get(profile.name)
            if known is None:
                new.append(self._enter_model(profile))
            else:
                known.plan(profile)
        return new

    def _enter_model(self, profile: ModelProfile) -> ModelState:
        if profile.kv.pool not in self.pools:
            raise ValueError(f"model {profile.name!r} names the unknown pool {profile.kv.pool!r}")
        model = ModelState(len(self.models), profile, self.pools[profile.kv.pool])
        self.models.append(model)
        self.by_name[profile.name] = model
        if profile.kv.pages_per_block:  # others have no part in it
            model.pool.models.append(model)
        return model

    # ------------------------------------------------------------ requests

    def arrived(self, request: QueuedRequest, now: float) -> LiveRequest:
        """A request joins its model's queue.

        Raises:
            KeyError: no such model.
            ValueError: a live request has that id.
        """
        live = self._enter(request)
        self._note(live, Event.CAME)
        model = live.model
        model.queue.add(live)
        model.tally.arrived += 1
        if model.both:
            self._settle(model.decode, now)
        return live

    def taken_over(self, request: QueuedRequest, now: float) -> LiveRequest:
        """A request came from another unit with its KV, which waits to be adopted by the engine that decodes.

        Raises:
            KeyError: no such model.
            ValueError: a live request has that id.
        """
        live = self._enter(request)
        model = live.model
        live.place = HANDED
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

    def cancelled(self, request_id: str, now: float) -> RequestPlace | None:
        """A request is not wanted any more. Returns where it was, None if it is not live.

        Its engine may be in the middle of a step: the lease stays until the engine has answered.
        """
        live = self.requests.get(request_id)
        if live is None:
            return None
        place = live.place
        live.model.tally.cancelled += 1
        self._leave(live, now, over=True)
        return place

    def given_back(self, request_id: str, now: float) -> bool:
        """A request that waits in its model's queue is to be served by another unit. False: it does not wait."""
        live = self.requests.get(request_id)
        if live is None or live.place is not QUEUED:
            return False
        live.model.tally.given_back += 1
        self._leave(live, now)
        return True

    def handed_over(self, request_id: str, lease_id: int, output_tokens: int, now: float) -> bool:
        """A prefill engine is done with a request that it got with lease `lease_id`. False: it holds no such one."""
        live = self.requests.get(request_id)
        if live is None or live.place is not PREFILLING or live.lease_id != lease_id:
            return False
        model = live.model
        del model.prefilling[request_id]
        model.prefill_tokens -= live.tokens
        live.place = HANDED
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
        if live is None or live.place is not PREFILLING or live.lease_id != lease_id or not live.model.both:
            return False
        model = live.model
        del model.prefilling[request_id]
        model.prefill_tokens -= live.tokens
        live.place = DECODING
        live.output_tokens = output_tokens
        self._decodes(live)
        lease = model.decode.lease
        if lease is not None and lease.phase is not PREFILL:
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
        self._leave(live, now, computed=True, over=True)
        return True

    def returned(self, request_id: str, lease_id: int, output_tokens: int, now: float) -> bool:
        """An engine gave back a request that it got with lease `lease_id`; it queues again, before others."""
        live = self.requests.get(request_id)
        if live is None or live.lease_id != lease_id or not lease_id:
            return False
        model = live.model
        engine = model.prefill if live.place is PREFILLING else model.decode
        if live.place is PREFILLING:
            del model.prefilling[request_id]
            self._not_prefilled(live)
        else:
            del model.decoding[request_id]
        self._note(live, Event.LEFT)
        self._decodes_no_more(live)
        model.seat(live.execution, -1)
        live.place = QUEUED
        live.lease_id = 0
        live.output_tokens = output_tokens
        live.resumed = True
        live.blocks = model.blocks_of_prompt(live.tokens)
        self._note(live, Event.CAME)
        model.queue.add(live)
        model.tally.returned += 1
        self._settle(engine, now)
        return True

    def detached(self, request_id: str, lease_id: int, output_tokens: int, now: float) -> bool:
        """An engine let go of a request that decodes, which it got with lease `lease_id`: it is on its way to another
        unit. False: this life of it is not in that engine; the engine may have nothing left for all that."""
        live = self.requests.get(request_id)
        if live is None or live.place is not DECODING or live.lease_id != lease_id:
            return False
        model = live.model
        del model.decoding[request_id]
        self._decodes_no_more(live)
        live.place = MOVING
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
        if live is None or live.place is not MOVING:
            return False
        model = live.model
        del model.moving[request_id]
        live.place = HANDED
        model.handed[request_id] = live
        self._settle(model.decode, now)
        return True

    def moved(self, request_id: str, now: float) -> bool:
        """Another unit has the request. False: it was not moving."""
        live = self.requests.get(request_id)
        if live is None or live.place is not MOVING:
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

    def _leave(
        self, live: LiveRequest, now: float, idle: bool = False, computed: bool = False, over: bool = False
    ) -> None:
        """Forget a request; with `idle`, its engine runs no step, and has no use for a lease if that was the last. With
        `computed`, all its tokens were, as far as the step tells that is reported next. It is `over` if nobody serves
        it any more."""
        model, request_id = live.model, live.request_id
        del self.requests[request_id]
        self._note(live, Event.LEFT, over)
        self._decodes_no_more(live)
        if live.place is not QUEUED:
            model.seat(live.execution, -1)
        place = live.place
        if place is DECODING:
            del model.decoding[request_id]
            self._settle(model.decode, now, idle)
        elif place is QUEUED:
            model.queue.remove(live)
            if model.both:
                self._settle(model.decode, now)
        elif place is PREFILLING:
            del model.prefilling[request_id]
            if computed:
                model.prefill_tokens -= live.tokens
            else:
                self._not_prefilled(live)
            self._settle(model.prefill, now, idle)
        elif place is HANDED:
            del model.handed[request_id]
            self._settle(model.decode, now)
        else:
            del model.moving[request_id]
        if not model.live:
            model.work_since = None

    @staticmethod
    def _decodes(live: LiveRequest) -> None:
        model = live.model
        live.entered_at = model.rounds
        model.decoding[live.request_id] = live
        model.counters.decodes(live.tenant, live.entered_at)

    @staticmethod
    def _decodes_no_more(live: LiveRequest) -> None:
        live.decoding_since = None
        if live.place is DECODING:
            live.model.counters.decodes_no_more(live.tenant, live.entered_at)
        if live.model.fresh:
            live.model.fresh.pop(live.request_id, None)

    @staticmethod
    def _note(live: LiveRequest, event: Event, over: bool = False) -> None:
        journal = live.model.journal
        if journal is None:
            return
        if event is Event.CAME:
            left = max(1, live.max_tokens - live.output_tokens)
            journal.append(Note(event, live.request_id, live.tokens, left, live.place is HANDED))
        else:
            journal.append(Note(event, live.request_id, over=over))

    @staticmethod
    def _not_prefilled(live: LiveRequest) -> None:
        """`live` will not be prefilled, or not now; what is still promised is at most what the others need."""
        model = live.model
        model.prefill_tokens -= live.tokens
        model.promise(min(model.outstanding, model.prefill_tokens))

    # ------------------------------------------------------------ leases

    @property
    def share_free(self) -> int:
        """Millionths of the unit's compute that no engine may be computing on."""
        return WHOLE - self.share_used

    def granted(self, grant: Grant, lease_id: int, now: float, alone: str = "") -> None:
        """A decision was carried out: the engine has the lease, and the admitted requests are in it. With `alone`, it
        computes only that one of those that it has."""
        model = self.by_name[grant.model]
        engine = model.engine(grant.phase)
        lease = LeaseState(grant, lease_id, now, alone)
        if engine.lease is not None:
            self.share_used -= engine.lease.held
            lease.replaces(engine.lease)
        else:
            engine.leases += 1
        engine.lease = lease
        engine.last_lease = lease_id
        self.share_used += lease.held
        if engine.wait_since is not None:
            if now > engine.wait_since:
                engine.waits += 1
                engine.wait_seconds += now - engine.wait_since
            engine.wait_since = None
        if model.fresh and grant.phase is not PREFILL:
            self._decode_begins(model, now)
        if not grant.admit:
            return
        engine.entered_with = lease_id
        engine.of(grant.phase).fed()
        tokens = 0
        for request_id in grant.admit:
            live = self.requests[request_id]
            live.lease_id = lease_id
            if live.place is QUEUED:
                model.queue.remove(live)
                live.place = PREFILLING
                model.prefilling[request_id] = live
                model.seat(live.execution, 1)
                tokens += live.tokens
                if not live.resumed:
                    model.counters.admitted(live.tenant, live.tokens)
            else:
                del model.handed[request_id]
                live.place = DECODING
                live.decoding_since = now
                self._decodes(live)
        if tokens:
            model.prefill_tokens += tokens
            model.promise(model.outstanding + tokens)

    def _decode_begins(self, model: ModelState, now: float) -> None:
        """An engine of both phases goes back to decoding: what was prefilled meanwhile has waited for it."""
        for request_id, since in model.fresh.items():
            live = self.requests[request_id]
            live.decoding_since = now
            model.counters.decodes_no_more(live.tenant, live.entered_at)
            self._decodes(live)
            model.tally.phase_switches += 1
            model.tally.phase_switch_seconds += now - since
        model.fresh.clear()

    def stepped(self, name: str, phase: Phase, done: StepsDone, now: float) -> None:
        """An engine reports steps. Comes after the requests that they finished, handed over, prefilled and returned.

        Whatever is left, a lease is over when the engine is empty or the time is up. A step that computed nothing with
        requests at hand means that they wait for pages (or a grammar): the engine is tried again after a short while,
        so that it does not hold compute for nothing.
        """
        model = self.by_name[name]
        engine = model.engine(phase)
        lease_id, prefill_tokens = done.lease_id, done.prefill_tokens
        if done.seconds > 0.0:
            if engine.prefills is not None:
                self._worked(model, done)
            else:
                engine.stepped(done.seconds, done.tokens, done.steps)
                prefill_tokens = done.tokens if phase is PREFILL else 0
        if phase is not DECODE:
            # Whose prompts are done left before this, so that what others still need is known only now: no more than
            # all their tokens, and less if a prefix was cached.
            model.promise(max(0, min(model.outstanding - prefill_tokens, model.prefill_tokens)))
        lease = engine.lease
        if lease is not None and lease_id >= lease.alone_since:
            lease.confirmed = True
        if lease is not None and lease.held > lease.share and lease_id >= lease.share_since:
            self.share_used -= lease.held - lease.share
            lease.held = lease.share
        if not done.remaining and not engine.inside and lease_id >= engine.entered_with:
            # Whatever lease the report is about, a later one brought nothing in. (If one did, and that was cancelled on
            # its way, the engine may take a step for it yet, and then tells of that one.)
            self._end_lease(engine)
        elif lease is not None and lease.lease_id == lease_id:
            self._reported(model, engine, lease, done, now)
        self._settle(engine, now)

    @staticmethod
    def _worked(model: ModelState, done: StepsDone) -> None:
        """An engine of both phases has run steps. A report may have those of two leases: then the last one did nothing
        but prefill, since such steps are reported one by one."""
        engine, prefills = model.decode, model.decode.prefills
        assert prefills is not None
        seconds, steps = done.seconds - done.prefill_seconds, done.steps
        if seconds <= 1e-9:
            prefills.stepped(done.seconds, done.tokens, steps)
            return
        if done.prefill_seconds > 0.0:
            prefills.stepped(done.prefill_seconds, done.prefill_tokens)
            steps = max(1, steps - 1)
        else:
            prefills.tokens += done.prefill_tokens
        decoded = done.tokens - done.prefill_tokens
        engine.stepped(seconds, decoded, steps)
        if decoded and model.decoding:
            engine.rounds += min(float(steps), decoded / len(model.decoding))

    def _reported(self, model: ModelState, engine: EngineState, lease: LeaseState, done: StepsDone, now: float) -> None:
        lease.left = done.left
        # Without a step it may have been asked in the middle of taking requests in.
        emptied = done.seconds > 0.0 and not done.remaining
        in_vain = done.seconds > 0.0 and not done.tokens
        if done.left <= 0 or emptied or now >= lease.deadline or self._useless(model, lease, in_vain):
            self._end_lease(engine)
            if done.tokens:
                engine.of(lease.phase).fed()
            elif in_vain:
                engine.of(lease.phase).starved(now)

    @staticmethod
    def _useless(model: ModelState, lease: LeaseState, in_vain: bool) -> bool:
        """A lease for one of both phases is over when there is nothing to do in that phase, and also when prompts wait
        for pages: only the other phase frees any."""
        if not model.both or lease.phase is BOTH:
            return False
        if lease.phase is PREFILL:
            return in_vain or not model.prefilling
        return not model.decoding

    def lease_void(self, name: str, phase: Phase, now: float) -> None:
        """The engine dropped its lease by itself."""
        engine = self.by_name[name].engine(phase)
        self._end_lease(engine)
        self._settle(engine, now)

    def next_retry(self) -> float:
        """When the next engine that waits for pages is to be tried again; infinity if there is none."""
        due = float("inf")
        for model in self.models:
            for engine in model.engines:
                lease, prefills = engine.lease, engine.prefills
                if not (engine.retry_at or (prefills is not None and prefills.retry_at)) or not engine.takes_work:
                    continue
                if lease is None and engine.retry_at and (engine.inside or engine.incoming):
                    due = min(due, engine.retry_at)
                decodes = lease is None or lease.phase is DECODE
                if prefills is not None and prefills.retry_at and model.prefilling and decodes:
                    due = min(due, prefills.retry_at)
        return due

    def _end_lease(self, engine: EngineState) -> None:
        if engine.lease is not None:
            self.share_used -= engine.lease.held
            engine.lease = None

    def _settle(self, engine: EngineState, now: float, idle: bool = False) -> None:
        """Keep the waiting time in line with the engine's work; an `idle` engine without requests loses its lease."""
        if idle and not engine.inside:
            self._end_lease(engine)
        if engine.up and engine.lease is None and (engine.inside or engine.incoming or engine.queue):
            if engine.wait_since is None:
                engine.wait_since = now
        else:
            engine.wait_since = None

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
        engine.of(PREFILL).fed()
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
            model.prefill.retry_at = model.decode.retry_at = model.decode.of(PREFILL).retry_at = 0.0
        model.used = used
        model.cached = cached
        model.quota = quota
        if used > model.peak:
            model.peak = used

    def pool_pages(self, name: str, free: int, cached: int, room: int | None = None, backed: int | None = None) -> None:
        """The memory manager's counts of one pool: pages free and pages cached, which it evicts when needed; those that
        may be in use, and those that have memory (None: as many as before)."""
        pool = self.pools[name]
        pool.room = pool.room if room is None else room
        pool.backed = pool.backed if backed is None else backed
        pool.free = free
        pool.available = free + cached
