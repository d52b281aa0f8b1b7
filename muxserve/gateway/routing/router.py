"""Where each request is served, and how it survives whoever dies, moves or is drained meanwhile.

Pure: no socket, no clock; it takes messages and what becomes of connections, with the time, and answers in its
`RouterOutbox`.

The gateway has the last word on where a request is: at (unit, attempt). Within an attempt only `TookOver` moves it. Any
other way out of a unit begins the next attempt, so that whatever the unit still says or sends is known to be stale.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from muxserve.gateway.routing.placing import Placing
from muxserve.gateway.routing.requests import Failure, RequestTable, RouterOutbox, Tracked
from muxserve.scheduling.quarantine import is_suspect
from muxserve.wire import Cancel, Degraded, Elsewhere, Lost, Message, Refused, RequestFailed, StateRequest, TookOver

log = logging.getLogger(__name__)


class Router:
    """Decides for all requests of a table.

    Args:
        table: the requests; the router and its `placing` alone say where they are.
    """

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self.out = RouterOutbox()
        self.placing = Placing(table, self.out)
        # The last epoch of each unit scheduler that has greeted.
        self._epochs: dict[str, str] = {}
        # Old lives of requests, (id, attempt), in units that cannot be reached at the moment.
        self._stale: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        # Units that have said nothing since requests were submitted to them once more.
        self._mute: set[str] = set()

    # ------------------------------------------------------------ the fleet

    def learn(
        self,
        units: Mapping[str, Collection[str]],
        asks: Iterable[str],
        models: Iterable[str],
        now: float,
        suspects: Collection[tuple[str, str]] = (),
    ) -> None:
        """The fleet has changed.

        Args:
            units: the models that each unit serves.
            asks: the models whose requests the global scheduler places.
            models: the models that are offered. Requests of others end as they can, or with an error when they have
                no unit any more.
            suspects: units and models of them that are passed over where others can serve, since a process there gives
                no sign of life.
        """
        asks, models = frozenset(asks), frozenset(models)  # both are needed twice, and may be iterators
        gone = [unit for unit in self._epochs if unit not in units]
        for unit in gone:
            del self._epochs[unit]
            self._stale.pop(unit, None)
        self._mute &= self._epochs.keys()
        self.placing.learn(units, asks, models, now, suspects)
        for unit in gone:
            self._leave(self.table.at(unit), now, "unit_removed", died=False)
        if gone:
            self.placing.learn(units, asks, models, now, suspects)

    def unit_up(self, unit: str, epoch: str, now: float) -> None:
        """A unit scheduler has greeted."""
        before = self._epochs.get(unit)
        self._epochs[unit] = epoch
        self.placing.up.add(unit)
        self._mute.discard(unit)
        if before != epoch:
            self.placing.heard_anew(unit)
        stale = self._stale.pop(unit, [])
        here = self.table.at(unit)
        if before is not None and before != epoch:
            log.warning("the unit scheduler of %s is a new one: submitting %d requests again", unit, len(here))
            for request in self._next(here, "unit_restarted", died=True):
                self.placing.give(request, unit, now)
        else:
            # Our last words to it may have been lost with the old connection.
            if stale:
                self._tell_cancelled(unit, stale)
            for request in here:
                request.repeated_at.add(unit)
                self.out.units.append((unit, request.submit()))
        # Requests wait for a unit that is down only as long as there is no other.
        up = self.placing.up
        stranded = [r for r in self.table.all() if r.unit and r.unit not in up and unit in self.placing.others(r)]
        self._leave(stranded, now, "unit_down", died=True)
        self.placing.settle(now)

    def unit_down(self, unit: str, now: float) -> None:
        """The connection to a unit scheduler is lost."""
        self.placing.up.discard(unit)
        leaving = [request for request in self.table.at(unit) if self.placing.others(request)]
        if leaving:
            log.warning("unit %s is gone: %d of its requests go elsewhere", unit, len(leaving))
        self._leave(leaving, now, "unit_down", died=True)

    # ------------------------------------------------------------ the front ends

    def submit(self, request: Tracked, now: float) -> None:
        """Serve a new request."""
        self.table.add(request)
        self.placing.place(request, now)

    def cancel(self, gone: Collection[Tracked]) -> None:
        """These requests, no longer in the table, are not wanted any more."""
        self.placing.withdraw(gone)
        self._cancel_at_units(gone)

    def give_up(self, request: Tracked, message: str, failure: Failure) -> None:
        """End a request that has waited for too long, wherever it is."""
        self.cancel([request])
        self.placing.fail(request, message, failure)

    # ------------------------------------------------------------ unit schedulers

    def take(self, unit: str, message: Message, now: float) -> bool:
        """A message of a unit scheduler; False if it is none of those that are about requests."""
        self._mute.discard(unit)
        match message:
            case Lost():
                lost = self._of(unit, message)
                if lost:
                    log.warning("%s lost %d requests: %s", unit, len(lost), message.reason)
                records = dict(zip(message.request_ids, message.failures, strict=False))
                for request in lost:
                    request.failures = records.get(request.request_id, request.failures)
                # One that has to be computed alone must not take the batch of another replica along as well.
                suspects = [request for request in lost if is_suspect(request.failures) and self._can_stay(request)]
                self._again_there(suspects, unit, now, message.reason)
                others = [request for request in lost if request not in suspects]
                self._leave(others, now, "engine_lost", died=True, last=message.reason)
            case RequestFailed():
                culprit = self.table.get(message.request_id)
                if culprit is not None and culprit.attempt == message.attempt and culprit.unit == unit:
                    self._cancel_at_units([culprit])
                    self.placing.fail(culprit, message.message, Failure.ERROR)
            case Elsewhere():
                back = self._of(unit, message)
                for request in back:
                    request.refused_by = (*request.refused_by, unit)
                self._leave(back, now, "drained", died=False)
            case TookOver():
                self._took_over(unit, message)
            case Degraded():
                self.placing.degraded(unit, message, now)
            case Refused():
                known = self.table.get(message.request_id)
                if known is not None and known.attempt == message.attempt and known.unit == unit:
                    self._refused(known, message.message, now)
            case _:
                return False
        return True

    # ------------------------------------------------------------ the engines

    def replace(self, request: Tracked, now: float, why: str) -> None:
        """Serve `request` anew under another id, since an engine may still have it under the old one."""
        unit = request.unit
        self._cancel_at_units([request])
        if not self.table.next_attempt(request, died=True):
            self.placing.fail(request, "engines dropped the request again and again", Failure.AGAIN)
            return
        self.table.rename(request)
        self.out.again.append((request, why))
        if unit in self.placing.up and unit in self.placing.replicas(request.model):
            self.placing.give(request, unit, now)
        else:
            self.placing.place(request, now)

    def finished(self, request: Tracked) -> None:
        """All tokens of `request` are there, which is no longer in the table."""
        # A unit may have been asked for it again just when it had finished, or moved.
        for unit in request.repeated_at:
            self._tell_cancelled(unit, [(request.request_id, request.attempt)])

    def repeat_quiet(self, now: float) -> None:
        """Ask units again for requests of which nothing was heard for long."""
        asked: dict[str, None] = {}
        for request in self.table.quiet(now, self.placing.up - self._mute):
            self.out.units.append((request.unit, request.submit()))
            asked[request.unit] = None
        # A unit scheduler takes no notice of what it has, so it is asked for a word: on the way to one that hangs,
        # bodies would pile up without end.
        self.out.units += [(unit, StateRequest()) for unit in asked]
        self._mute |= asked.keys()

    # ------------------------------------------------------------ inside

    def _of(self, unit: str, message: Lost | Elsewhere) -> list[Tracked]:
        """Those requests of `message` that are at `unit` as the attempt that it means: what it says of others is
        stale."""
        lives = dict(zip(message.request_ids, message.attempts, strict=False))
        known = ((self.table.get(request_id), attempt) for request_id, attempt in lives.items())
        return [r for r, attempt in known if r is not None and r.unit == unit and r.attempt == attempt]

    def _refused(self, request: Tracked, reason: str, now: float) -> None:
        """Its unit can never serve it; one that has more room may."""
        request.refused_by = (*request.refused_by, request.unit)
        if self.placing.others(request):
            self._leave([request], now, "refused", died=False)
        else:
            self.placing.fail(request, reason, Failure.NEVER)

    def _took_over(self, unit: str, message: TookOver) -> None:
        request = self.table.get(message.request_id)
        if request is None or request.attempt != message.attempt or not request.unit:
            self._tell_cancelled(unit, [(message.request_id, message.attempt)])
            return
        if 0 < message.moves <= request.moves:
            return  # it has moved on from there since
        request.moves = message.moves
        source = request.unit
        if source == unit:
            return
        self.table.assign(request, unit)
        self.out.moved.append((request, source, unit))

    def _leave(self, requests: Iterable[Tracked], now: float, why: str, died: bool, last: str = "") -> None:
        """These requests' present attempt is over, wherever it was; they are placed again."""
        units = {request: request.unit for request in requests}
        # They are out of that unit now, whichever attempt it has just spoken of, and even if it is only cut off.
        self._cancel_at_units(units)
        for request in self._next(units, why, died, last):
            self.placing.place(request, now, units[request])

    def _can_stay(self, request: Tracked) -> bool:
        return request.unit in self.placing.candidates(request)

    def _again_there(self, requests: Iterable[Tracked], unit: str, now: float, last: str) -> None:
        """The present attempt of these requests is over at `unit`, which serves them again."""
        requests = list(requests)
        self._cancel_at_units(requests)
        for request in self._next(requests, "engine_lost", died=True, last=last):
            self.placing.give(request, unit, now)

    def _next(self, requests: Iterable[Tracked], why: str, died: bool, last: str = "") -> list[Tracked]:
        """The next attempt of each; without those that have failed too often."""
        going_on = []
        for request in requests:
            if self.table.next_attempt(request, died):
                self.out.again.append((request, why))
                going_on.append(request)
            else:
                text = f"the request was tried {request.tries} times, and each time whoever served it died"
                self.placing.fail(request, f"{text} ({last or why})", Failure.AGAIN)
        return going_on

    def _cancel_at_units(self, requests: Iterable[Tracked]) -> None:
        by_unit: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for request in requests:
            for unit in request.repeated_at | {request.unit}:
                by_unit[unit].append((request.request_id, request.attempt))
        for unit, lives in by_unit.items():
            self._tell_cancelled(unit, lives)

    def _tell_cancelled(self, unit: str, lives: list[tuple[str, int]]) -> None:
        """These lives, (id, attempt), are over. A later one may have moved to the unit before it hears this."""
        if unit in self.placing.up:
            self.out.units.append((unit, Cancel([life[0] for life in lives], [life[1] for life in lives])))
        elif unit in self._epochs:
            self._stale[unit] += lives
