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

Units whose engines cannot change their share (`ModelProfile.elastic`) keep to the planned ones and alternate as under
`adbs`; prefill is batched there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from muxserve.scheduling.adbs import Adbs, AdbsConfig
from muxserve.scheduling.admission import admissible, head_fits, room, wants_prefill
from muxserve.scheduling.leases import LeaseState
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import WHOLE, Grant

# Shares are whole hundredths of the unit: MPS takes percent, and sets of SMs are coarser still.
GRAIN = WHOLE // 100
_NEVER = float("inf")


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


class Slack(Adbs):
    """One object serves one unit."""

    name = "slack"

    def __init__(self, config: SlackConfig | None = None) -> None:
        self._rules = config or SlackConfig()
        super().__init__(self._rules)
        # By model: since when a prefill has been held back.
        self._held: dict[int, float] = {}

    # ------------------------------------------------------------ jobs

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        if not _elastic(ledger):
            return super().decide(ledger, now)
        models = ledger.models
        if len(self._limits) != len(models):
            self._limits = [WHOLE * WHOLE] * len(models)
        prefilling: ModelState | None = None
        leased: list[ModelState] = []
        ready: list[ModelState] = []
        for model in models:
            if prefilling is None and model.prefill.lease is not None:
                prefilling = model
            if model.decode.lease is not None:
                leased.append(model)
            elif model.decode.ready(now):
                ready.append(model)
        candidate = self._candidate(ledger, now, prefilling)
        starting = candidate if prefilling is None else None
        if len(ready) > 1:
            # Whose next token is due first.
            ready.sort(key=lambda m: (m.decode.wait_since or 0.0, m.index))
        overdue = self._overdue(ready, now) if ready else []
        # A lease that was waited for that long is not recalled.
        first = overdue
        if self._firm:
            first = [m for m in leased if m.decode.lease and self._firm.get(m.index) == m.decode.lease.granted_at]
            first += overdue
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
                limit = self._limits[starting.index]
                grants.append(self._prefill_job(ledger, starting, limit, share=division.prefill))
                self._next_prefill = (starting.index + 1) % len(models)
                self._held.pop(starting.index, None)
            # If not, what others give up is its.
            free -= division.prefill
        for model in ready:
            share = division.decode.get(model.index)
            if share is None:
                continue
            if share <= free:
                grants.append(self._decode_grant(model, contended, share))
                if model in overdue:
                    self._firm[model.index] = now
            free -= share
        if prefilling is not None and prefilling.prefill.lease is not None:
            share = _towards(division.prefill, prefilling.prefill.lease, free)
            free -= max(0, share - prefilling.prefill.lease.held)
            admission = None
            if candidate is None and prefilling.queue:
                admission = admissible(ledger, prefilling, self._limits[prefilling.index], ahead=True)
            if admission is not None or share != prefilling.prefill.lease.share:
                grants.append(self._prefill_grant(prefilling, admission, share))
        for model in leased:
            grant = self._goes_on(model, division.decode.get(model.index), contended, free, now)
            if grant is not None:
                grants.append(grant)
                free -= max(0, grant.share - model.decode.lease.held) if model.decode.lease is not None else 0
        return grants

    def _goes_on(self, model: ModelState, target: int | None, contended: bool, free: int, now: float) -> Grant | None:
        """What a running decode lease needs, to have the share `target` (None: to stop)."""
        lease = model.decode.lease
        assert lease is not None
        if target is None:
            return self._recall(model)
        if not lease.renewable:
            return None
        share = _towards(target, lease, free)
        if share == lease.share:
            return self._renewal(model, now, contended) or (self._shortened(model) if contended else None)
        if not contended:
            return self._decode_grant(model, contended=False, share=share)
        # With another share a lease is no longer.
        steps = min(lease.left, self.quanta.decode_steps(model.decode.step_seconds, contended=True))
        grant = self._decode_grant(model, contended=True, share=share, steps=max(1, steps))
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
            tokens = float(model.outstanding)
            waiting = len(model.queue)
            if waiting and head_fits(ledger, model, self._limits[model.index]):
                seated = model.in_engines
                seats = min(waiting, model.max_seqs - seated)
                blocks = min(model.queue.blocks * seats / waiting, room(model, seated, self._limits[model.index]))
                tokens += max(0.0, blocks - seats * model.state_blocks) * model.block_tokens
            steps += tokens / model.batch_tokens
        return steps >= self._rules.pressing

    # ------------------------------------------------------------ slack

    def _candidate(self, ledger: UnitLedger, now: float, prefilling: ModelState | None) -> ModelState | None:
        models = ledger.models
        if not any(model.decode.lease is not None for model in models):
            self._held.clear()
            return super()._candidate(ledger, now, prefilling)
        count, start = len(models), self._next_prefill
        found: ModelState | None = None
        for offset in range(count):
            model = models[(start + offset) % count]
            asks = model is not prefilling and (model.queue or model.prefilling)
            if not asks or not wants_prefill(ledger, model, now, self._limits[model.index]):
                if self._held:
                    self._held.pop(model.index, None)
            elif found is None and not self._waits(ledger, model, now):
                found = model
        return found

    def _waits(self, ledger: UnitLedger, model: ModelState, now: float) -> bool:
        """A prefill of `model` is held back now, since it would be small and others will be let in soon."""
        if model.prefilling:
            return False
        admission = admissible(ledger, model, self._limits[model.index])
        if admission is None or admission.tokens >= self._rules.worth * model.batch_tokens:
            return False
        # With shares for life a prefill takes little from decode, however large the batch is.
        crowded = model.profile.elastic and model.in_engines >= self._rules.crowd * model.max_seqs
        if len(admission.request_ids) == len(model.queue) and not crowded:
            return False
        return now < self._held.setdefault(model.index, now) + self._rules.slack

    def wakeup(self, ledger: UnitLedger, now: float) -> float:
        ends = [since + self._rules.slack for since in self._held.values() if since + self._rules.slack > now]
        return min(super().wakeup(ledger, now), *ends, _NEVER)


def _elastic(ledger: UnitLedger) -> bool:
    """All engines can change their share."""
    for model in ledger.models:  # noqa: SIM110 - generators are slow, and every decision asks
        if not model.profile.elastic:
            return False
    return True


def _among(chosen: list[ModelState], bases: list[int], planned: int, part: int) -> dict[int, int]:
    """Divide `part` of the unit among decode engines with `planned` shares in all: each has its least, which `bases`
    are, and what is left goes to the sequences of their batches, as much to each. Of their number only the order of
    magnitude counts, so that shares do not change with every request."""
    spare = part - sum(bases)
    if spare < 0:
        bases = [model.decode.share * part // planned for model in chosen]
        spare = 0
    needs = [1 << len(model.decoding).bit_length() for model in chosen]
    whole = sum(needs)
    shares: dict[int, int] = {}
    for model, base, need in zip(chosen, bases, needs, strict=True):
        share = (base + spare * need // whole) // GRAIN * GRAIN
        shares[model.index] = share if share > GRAIN else GRAIN
    return shares


def _stepped(part: int, step: int) -> int:
    """The multiple of `step` next to `part`, with one step at least on either side."""
    return min(max(step, round(part / step) * step), WHOLE - step)


def _towards(target: int, lease: LeaseState, free: int) -> int:
    """The share of a running lease that is to have `target`, as far as it is `free`."""
    return target if target < lease.share else max(lease.share, min(target, lease.held + max(0, free)))
