"""Leases of a unit's engines, and what engines report under them: the half of the ledger that is about compute."""

from __future__ import annotations

from muxserve.scheduling.engines import EngineState, LeaseState
from muxserve.scheduling.state import LiveRequest, ModelState
from muxserve.scheduling.types import WHOLE, Grant, Phase, Place


class Leases:
    """Who runs, for how long, with which share; and how much the engines have done."""

    def __init__(self) -> None:
        self.models: list[ModelState] = []
        self.by_name: dict[str, ModelState] = {}
        self.requests: dict[str, LiveRequest] = {}
        self.share_used = 0

    @property
    def share_free(self) -> int:
        """Millionths of the unit's compute that no lease holds."""
        return WHOLE - self.share_used

    def granted(self, grant: Grant, lease_id: int, now: float, alone: str = "") -> None:
        """A decision was carried out: the engine has the lease, and the admitted requests are in it. With `alone`, it
        computes only that one of those that it has."""
        model = self.by_name[grant.model]
        engine = model.engine(grant.phase)
        since, confirmed = lease_id, False
        if engine.lease is not None:
            self.share_used -= engine.lease.share
            if alone and engine.lease.alone == alone:
                since, confirmed = engine.lease.alone_since, engine.lease.confirmed
        engine.lease = LeaseState(
            lease_id,
            grant.steps,
            grant.steps,
            now,
            now + grant.seconds,
            grant.share,
            grant.renewable,
            grant.phase,
            alone,
            since,
            confirmed,
        )
        engine.last_lease = lease_id
        self.share_used += grant.share
        if engine.wait_since is not None:
            if now > engine.wait_since:
                engine.waits += 1
                engine.wait_seconds += now - engine.wait_since
            engine.wait_since = None
        if model.fresh and grant.phase is not Phase.PREFILL:
            self._decode_begins(model, now)
        if not grant.admit:
            return
        engine.entered_with = lease_id
        engine.of(grant.phase).fed()
        tokens = 0
        for request_id in grant.admit:
            live = self.requests[request_id]
            live.lease_id = lease_id
            if live.place is Place.QUEUED:
                model.queue.remove(live)
                live.place = Place.PREFILLING
                model.prefilling[request_id] = live
                model.seat(live.execution, 1)
                tokens += live.tokens
            else:
                del model.handed[request_id]
                live.place = Place.DECODING
                live.entered_at = model.rounds
                live.decoding_since = now
                model.decoding[request_id] = live
        if tokens:
            model.prefill_tokens += tokens
            model.promise(model.outstanding + tokens)

    def _decode_begins(self, model: ModelState, now: float) -> None:
        """An engine of both phases goes back to decoding: what was prefilled meanwhile has waited for it."""
        for request_id, since in model.fresh.items():
            live = self.requests[request_id]
            live.decoding_since = now
            live.entered_at = model.rounds
            model.tally.phase_switches += 1
            model.tally.phase_switch_seconds += now - since
        model.fresh.clear()

    def stepped(
        self,
        name: str,
        phase: Phase,
        lease_id: int,
        left: int,
        seconds: float,
        tokens: int,
        remaining: int,
        now: float,
        steps: int = 1,
        prefill_tokens: int = 0,
        prefill_seconds: float = 0.0,
    ) -> None:
        """An engine reports `steps` steps of `seconds` and `tokens` in all, `left` steps of lease `lease_id`, and
        `remaining` requests in it. To be told after what the steps finished, handed over, prefilled and returned. A
        report without `seconds` says that no step was run. One of both phases says how many `prefill_tokens` of the
        tokens were, and how many `prefill_seconds` went into steps that did nothing else.

        Whatever is left, a lease is over when the engine is empty or the time is up. A step that computed nothing with
        requests at hand means that they wait for pages (or a grammar): the engine is tried again after a short while,
        so that it does not hold compute for nothing.
        """
        model = self.by_name[name]
        engine = model.engine(phase)
        if seconds > 0.0:
            if engine.prefills is not None:
                self._worked(model, seconds, tokens, steps, prefill_tokens, prefill_seconds)
            else:
                engine.stepped(seconds, tokens, steps)
                prefill_tokens = tokens if phase is Phase.PREFILL else 0
        if phase is not Phase.DECODE:
            # Whose prompts are done left before this, so that what others still need is known only now: no more than
            # all their tokens, and less if a prefix was cached.
            model.promise(max(0, min(model.outstanding - prefill_tokens, model.prefill_tokens)))
        lease = engine.lease
        if lease is not None and lease_id >= lease.alone_since:
            lease.confirmed = True
        if not remaining and not engine.inside and lease_id >= engine.entered_with:
            # Whatever lease the report is about, a later one brought nothing in. (If one did, and that was cancelled on
            # its way, the engine may take a step for it yet, and then tells of that one.)
            self._end_lease(engine)
        elif lease is not None and lease.lease_id == lease_id:
            self._reported(model, engine, lease, left, seconds, tokens, remaining, now)
        self._settle(engine, now)

    @staticmethod
    def _worked(
        model: ModelState, seconds: float, tokens: int, steps: int, prefill_tokens: int, prefill_seconds: float
    ) -> None:
        """An engine of both phases has run steps. Those of two leases may be told together: then the last one did
        nothing but prefill, since these are told one by one."""
        engine, prefills = model.decode, model.decode.prefills
        assert prefills is not None
        rest = seconds - prefill_seconds
        if rest <= 1e-9:
            prefills.stepped(seconds, tokens, steps)
            return
        if prefill_seconds > 0.0:
            prefills.stepped(prefill_seconds, prefill_tokens)
            steps = max(1, steps - 1)
        else:
            prefills.tokens += prefill_tokens
        decoded = tokens - prefill_tokens
        engine.stepped(rest, decoded, steps)
        if decoded and model.decoding:
            engine.rounds += min(float(steps), decoded / len(model.decoding))

    def _reported(
        self,
        model: ModelState,
        engine: EngineState,
        lease: LeaseState,
        left: int,
        seconds: float,
        tokens: int,
        remaining: int,
        now: float,
    ) -> None:
        lease.left = left
        # Without a step it may have been asked in the middle of taking requests in.
        emptied = seconds > 0.0 and not remaining
        in_vain = seconds > 0.0 and not tokens
        if left <= 0 or emptied or now >= lease.deadline or self._useless(model, lease, in_vain):
            self._end_lease(engine)
            if tokens:
                engine.of(lease.phase).fed()
            elif in_vain:
                engine.of(lease.phase).starved(now)

    @staticmethod
    def _useless(model: ModelState, lease: LeaseState, in_vain: bool) -> bool:
        """A lease for one of both phases is over when there is nothing to do in that phase, and also when prompts wait
        for pages: only the other phase frees any."""
        if not model.both or lease.phase is Phase.BOTH:
            return False
        if lease.phase is Phase.PREFILL:
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
                if not engine.takes_work:
                    continue
                lease, prefills = engine.lease, engine.prefills
                if prefills is None:
                    work = bool(engine.inside or engine.incoming)
                else:
                    work = bool(model.decoding or model.handed)
                    free = lease is None or lease.phase is Phase.DECODE
                    if prefills.retry_at and model.prefilling and free:
                        due = min(due, prefills.retry_at)
                if lease is None and engine.retry_at and work:
                    due = min(due, engine.retry_at)
        return due

    def _end_lease(self, engine: EngineState) -> None:
        if engine.lease is not None:
            self.share_used -= engine.lease.share
            engine.lease = None

    def _settle(self, engine: EngineState, now: float, idle: bool = False) -> None:
        """Keep the waiting time in line with the engine's work; an `idle` engine without requests loses its lease."""
        if idle and not engine.inside:
            self._end_lease(engine)
        if engine.up and engine.lease is None and (engine.inside or engine.incoming):
            if engine.wait_since is None:
                engine.wait_since = now
        else:
            engine.wait_since = None
