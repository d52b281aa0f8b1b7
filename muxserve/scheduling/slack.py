"""ADBS with shares per lease and slack-aware prefill: work-conserving in compute, as the pool is in pages.

What differs from `adbs` (MuxServe, arXiv:2404.02015, Algorithm 3, whose text has SMs partitioned dynamically):

* **Shares follow the load.** Jobs that run divide the whole unit between them. While planned shares do not fill it,
  what is left goes to the prefill job, which gains from all of it, or without one to the decode engines. While they do
  not fit, decode engines give way, down to `least` of theirs. Where some batch is large, in which requests spend most
  of their time, prefill gives way before, down to half of its planned share, unless prompts for a whole step wait that
  could be admitted: then prefill is the bottleneck. Only what does not fit even so waits. Shares change when
  jobs come and go; an engine meets a smaller one between two steps, and only then do others get the difference.
* **Decode's part is divided by sequences.** A step of n sequences takes about n / share, and n sequences wait for it:
  all sequences together wait least where shares are in proportion to n.
* **Prefill is batched while there is slack.** Where more prompts wait than seats, pages or a step let in, starting one
  for each seat that comes free costs the weights' read every time; and where the batch is large, all its sequences are
  slowed. Then a prefill of less than `worth` of a step is held back for up to `slack` seconds while decode runs. At
  light load nothing is held back.

Units whose engines cannot change their share (`EngineSetup.elastic`) keep to the planned ones and alternate as under
`adbs`; prefill is batched there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from muxserve.scheduling.adbs import Adbs, AdbsConfig
from muxserve.scheduling.admission import admissible, head_fits, room, wants_decode
from muxserve.scheduling.leases import LeaseState
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy, overdue
from muxserve.scheduling.prefill_order import PrefillOrder
from muxserve.scheduling.quotas import AdaptiveQuotas, Quotas
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import WHOLE, Grant

# Shares are whole hundredths of the unit: MPS takes percent, and sets of SMs are coarser still.
GRAIN = WHOLE // 100


@dataclass(slots=True)
class SlackConfig(AdbsConfig):
    """`least` is the part of its planned share below which no decode engine runs. A prefill of `worth`, in parts of a
    step's tokens, is never held back, others for `slack` seconds. A batch is large from `crowd`, a part of the model's
    seats, on; prefill is the bottleneck from `pressing`, steps' worth of prompts, on. Where prefill ends and decode
    begins is a multiple of `boundary` millionths, if that is not 0: the sizes of share that engines have."""

    least: float = 0.25
    worth: float = 0.25
    slack: float = 0.1
    crowd: float = 0.125
    pressing: float = 1.0
    boundary: int = 0


class Division(NamedTuple):
    """Shares of the prefill job and, by index, of the models whose decode engines run; the others wait."""

    prefill: int
    decode: dict[int, int]


class Slack(Policy):
    """One object serves one unit. Where engines cannot change their share, it lets `Adbs` decide, with prefill jobs in
    an order of its own."""

    name = "slack"

    def __init__(self, config: SlackConfig | None = None) -> None:
        self._rules = config or SlackConfig()
        super().__init__(self._rules.quanta, AdaptiveQuotas(self._rules.quotas))
        self._small = SmallPrefills(self._rules, self.quotas)
        self._order = PrefillOrder(self.quotas, self._small)
        self._planned = Adbs(self._rules, self.quotas, self._order)
        # By index of the model: when a lease that was waited for long was granted, which is not recalled.
        self._firm: dict[int, float] = {}

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        if not _elastic(ledger):
            return self._planned.decide(ledger, now)
        prefilling: ModelState | None = None
        leased: list[ModelState] = []
        ready: list[ModelState] = []
        for model in ledger.models:
            if prefilling is None and model.prefill.lease is not None and not model.both:
                prefilling = model
            if model.decode.lease is not None:
                leased.append(model)
            elif wants_decode(ledger, model, now, self.limit(model)):
                ready.append(model)
        candidate = self._order.next(ledger, now, prefilling)
        starting = candidate if prefilling is None else None
        if len(ready) > 1:
            # Whose next token is due first.
            ready.sort(key=lambda m: (m.decode.wait_since or 0.0, m.index))
        waited = overdue(ready, now - self._rules.patience - len(ready) * self.quanta.contended_seconds)
        first = waited
        if self._firm:
            first = [m for m in leased if m.decode.lease and self._firm.get(m.index) == m.decode.lease.granted_at]
            first += waited
        order = leased + ready
        if first:
            order = first + [model for model in order if model not in first]

        prefill = prefilling or starting
        gives_way = prefill is not None and self._gives_way(ledger)
        division = self._divide(prefill, order, len(first), gives_way)
        contended = len(division.decode) < len(order)

        free = ledger.share_free
        grants: list[Grant] = []
        if starting is not None:
            if division.prefill <= free:
                grants.append(self._prefill_job(ledger, starting, division.prefill))
                self._order.started(ledger, starting)
            # If not, what others give up is its.
            free -= division.prefill
        for model in ready:
            share = division.decode.get(model.index)
            if share is None:
                continue
            if share <= free:
                grants.append(self._decode_job(ledger, model, contended, share))
                if model in waited:
                    self._firm[model.index] = now
            free -= share
        if prefilling is not None and prefilling.prefill.lease is not None:
            lease = prefilling.prefill.lease
            share = _towards(division.prefill, lease, free)
            free -= max(0, share - lease.held)
            grant = self._prefill_goes_on(ledger, prefilling, share) if candidate is None else None
            if grant is None and share != lease.share:
                grant = self._prefill_grant(prefilling, None, share)
            if grant is not None:
                grants.append(grant)
        for model in leased:
            grant = self._goes_on(ledger, model, division.decode.get(model.index), contended, free, now)
            if grant is not None:
                grants.append(grant)
                free -= max(0, grant.share - model.decode.lease.held) if model.decode.lease is not None else 0
        return grants

    def _goes_on(
        self, ledger: UnitLedger, model: ModelState, target: int | None, contended: bool, free: int, now: float
    ) -> Grant | None:
        """What a running decode lease needs, to have the share `target` (None: to stop)."""
        lease = model.decode.lease
        assert lease is not None
        if target is None:
            return self._recall(model)
        if not lease.renewable:
            return None
        share = _towards(target, lease, free)
        if share == lease.share:
            renewal = self._renewal(ledger, model, now, contended)
            return renewal or (self._shortened(model) if contended else None)
        if not contended:
            return self._decode_job(ledger, model, contended=False, share=share)
        # With another share a lease is no longer.
        steps = min(lease.left, self.quanta.decode_steps(model.decode.step_seconds, contended=True))
        prompts = self._entering(ledger, model)
        grant = self._decode_grant(model, contended=True, share=share, steps=max(1, steps), prompts=prompts)
        return grant._replace(seconds=max(min(grant.seconds, lease.deadline - now), 0.001))

    def _divide(
        self, prefill: ModelState | None, decoding: list[ModelState], certain: int, gives_way: bool
    ) -> Division:
        """Divide the unit between the prefill job, if there is one, and decode engines in order of precedence. The
        first `certain` of these get a share whatever the others need; prefill `gives_way` to them, or they to it."""
        own = prefill.prefill.share if prefill is not None else 0
        least = own // 2 if gives_way else own
        needed, wanted, part_of = least, own, self._rules.least
        chosen: list[ModelState] = []
        bases: list[int] = []
        for place, model in enumerate(decoding):
            planned = model.decode.share
            base = int(planned * part_of)
            share = base if base > GRAIN else GRAIN
            if needed + share <= WHOLE or place < certain:
                chosen.append(model)
                bases.append(base)
                needed += share
                wanted += planned
        if not chosen:
            return Division(WHOLE if own else 0, {})
        decode = wanted - own
        part = decode
        if not own:
            part = WHOLE
        elif needed > WHOLE:
            # Those that are certain do not fit even so.
            part = decode * WHOLE // wanted
        elif wanted > WHOLE:
            part = min(decode, max(int(decode * part_of), WHOLE - least))
        boundary = self._rules.boundary if own else 0
        if boundary:
            part = _stepped(part, boundary)
        shares = _among(chosen, bases, decode, part)
        given = sum(shares.values())
        if boundary and part > given:
            shares[chosen[0].index] += part - given
            given = part
        if own:
            return Division(WHOLE - given, shares)
        # Nothing is idle for being less than a grain for each.
        shares[chosen[0].index] += WHOLE - given
        return Division(0, shares)

    def _gives_way(self, ledger: UnitLedger) -> bool:
        """Prefill leaves to large batches what it can."""
        return self._crowded(ledger) and not self._pressed(ledger)

    def _crowded(self, ledger: UnitLedger) -> bool:
        """Some model's batch is large, so that many sequences are slowed by what prefill takes."""
        crowd = self._rules.crowd
        for model in ledger.models:  # noqa: SIM110 - generators are slow, and every decision asks
            if len(model.decoding) >= crowd * model.max_seqs:
                return True
        return False

    def _pressed(self, ledger: UnitLedger) -> bool:
        """Prompts that are in prefill engines, or could be, are so many steps' worth that prefill is the bottleneck."""
        steps = 0.0
        for model in ledger.models:
            if model.both:
                continue
            tokens, limit = float(model.outstanding), self.limit(model)
            waiting = len(model.queue)
            if waiting and head_fits(ledger, model, limit):
                seated = model.in_engines
                seats = min(waiting, model.max_seqs - seated)
                blocks = min(model.queue.blocks * seats / waiting, room(model, seated, limit))
                tokens += max(0.0, blocks - seats * model.state_blocks) * model.block_tokens
            steps += tokens / model.batch_tokens
        return steps >= self._rules.pressing

    def wakeup(self, ledger: UnitLedger, now: float) -> float:
        return min(super().wakeup(ledger, now), self._small.due(now))


class SmallPrefills:
    """Holds small prefill jobs back that larger ones will replace soon."""

    def __init__(self, rules: SlackConfig, quotas: Quotas) -> None:
        self._rules = rules
        self._quotas = quotas
        # By index of the model: since when its job has been held back.
        self._since: dict[int, float] = {}

    def waits(self, ledger: UnitLedger, model: ModelState, now: float) -> bool:
        """Whether the job of `model` waits now, since it would be small and others will be let in soon."""
        if model.prefilling:
            return False
        admission = admissible(ledger, model, self._quotas.limit(model))
        if admission is None or admission.tokens >= self._rules.worth * model.batch_tokens:
            return False
        # With shares for life a prefill takes little from decode, however large the batch is.
        crowded = model.profile.engines.elastic and model.in_engines >= self._rules.crowd * model.max_seqs
        if len(admission.request_ids) == len(model.queue) and not crowded:
            return False
        return now < self._since.setdefault(model.index, now) + self._rules.slack

    def forget(self, model: ModelState) -> None:
        """`model` has no job, or runs it."""
        if self._since:
            self._since.pop(model.index, None)

    def clear(self) -> None:
        """Nothing waits any more."""
        self._since.clear()

    def due(self, now: float) -> float:
        """When the next job has waited long enough."""
        ends = [since + self._rules.slack for since in self._since.values() if since + self._rules.slack > now]
        return min(ends, default=float("inf"))


def _elastic(ledger: UnitLedger) -> bool:
    """All engines can change their share."""
    for model in ledger.models:  # noqa: SIM110 - generators are slow, and every decision asks
        if not model.profile.engines.elastic:
            return False
    return True


def _among(chosen: list[ModelState], bases: list[int], planned: int, part: int) -> dict[int, int]:
    """Divide `part` of the unit among decode engines with `planned` shares in all: each has its least, which `bases`
    are, and what is left goes to the sequences of their batches, as much to each. Only the order of magnitude of
    their number counts, so that shares do not change with every request."""
    spare = part - sum(bases)
    if spare < 0:
        bases = [model.decode.share * part // planned for model in chosen]
        spare = 0
    needs = [1 << _sequences(model).bit_length() for model in chosen]
    whole = sum(needs)
    shares: dict[int, int] = {}
    for model, base, need in zip(chosen, bases, needs, strict=True):
        share = (base + spare * need // whole) // GRAIN * GRAIN
        shares[model.index] = share if share > GRAIN else GRAIN
    return shares


def _sequences(model: ModelState) -> int:
    """Requests that wait for a step of the engine that decodes."""
    return len(model.decoding) + (len(model.prefilling) if model.both else 0)


def _stepped(part: int, step: int) -> int:
    """The multiple of `step` next to `part`, with one step at least on either side."""
    return min(max(step, round(part / step) * step), WHOLE - step)


def _towards(target: int, lease: LeaseState, free: int) -> int:
    """The share of a running lease that is to have `target`, as far as it is `free`."""
    return target if target < lease.share else max(lease.share, min(target, lease.held + max(0, free)))
