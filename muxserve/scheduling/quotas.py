"""Quotas of pages: where they start, and how they follow the load.

MuxServe (arXiv:2404.02015) gives each model of a unit a quota of token blocks in its share of the demand and moves
blocks from models that use little of theirs to models that use much. Fairness is its Eq. 2: |R_i - R_j| <= epsilon,
where R is a model's use of token blocks normalised by its request rate.

Here both follow from one rule, weighted max-min fairness. With w_i the demand weight of a model (request rate x layers
x KV heads x tokens of a request), a model gets what it can use, but no more than `level` x w_i, with the one level at
which the quotas fill the pool. So models that want more than they can have end up with the same quota per weight, which
is Eq. 2 with R_i = pages_i / w_i, and what the others leave unused goes to them in that proportion. Where a request
needs more than that, others make room for it (`long_requests.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.long_requests import fitting, head_pages, long_request_floors, prompt_pages
from muxserve.scheduling.state import ModelState, PoolState
from muxserve.scheduling.types import ModelProfile, QuotaChange


@dataclass(frozen=True, slots=True)
class Claim:
    """One model's claim on a pool: its weight, the pages that it gets at least, and the most it can use."""

    weight: float
    floor: int
    most: float = float("inf")


def demand_weight(profile: ModelProfile) -> float:
    """Pages per second of load: rate x blocks of a request x layers x KV heads, where the blocks are tokens / tokens
    per block and those of its states; without what is given back behind a window."""
    kv = profile.kv
    blocks = profile.tokens / kv.block_tokens + kv.state_blocks
    behind = max(0.0, profile.tokens - kv.window) / kv.block_tokens * kv.windowed_pages
    return profile.rate * (blocks * kv.pages_per_block - behind)


def max_min(pages: int, claims: Sequence[Claim]) -> list[int]:
    """Weighted max-min fair division of `pages`, whole numbers that sum to `pages`.

    Every claim gets max(floor, min(most, level x weight)). What is left when all have their most raises those with the
    least per weight, so that without demand the division is the one by weight.

    Raises:
        ValueError: the floors alone exceed `pages`, or a weight is not positive.
    """
    if not claims:
        return []
    if any(not claim.weight > 0.0 for claim in claims):
        raise ValueError("every model needs a request rate above zero")
    floors = sum(claim.floor for claim in claims)
    if floors > pages:
        raise ValueError(f"the pool has {pages} pages, and the models need at least {floors} between them")
    shares = _fill(pages, claims)
    left = pages - sum(shares, 0.0)
    if left > 1e-6 * pages:
        shares = _fill(pages, [Claim(c.weight, 0) for c in claims], shares)
    return _whole(pages, shares)


def _fill(pages: int, claims: Sequence[Claim], least: Sequence[float] | None = None) -> list[float]:
    """Raise the level until the shares sum to `pages` or every claim has its most."""
    floors = [float(claim.floor) for claim in claims] if least is None else list(least)
    shares = list(floors)
    left = pages - sum(floors, 0.0)
    # The sum grows linearly in the level between the levels at which a claim joins (its floor is reached) or leaves.
    events = []
    for index, claim in enumerate(claims):
        most = max(claim.most, floors[index])
        events.append((floors[index] / claim.weight, 1, index))
        events.append((most / claim.weight, 0, index))
    events.sort()
    level = growing = 0.0
    for at, joins, index in events:
        if growing * (at - level) > left:
            break
        left -= growing * (at - level)
        level = at
        growing += claims[index].weight if joins else -claims[index].weight
    else:
        return [max(floor, claim.most) for floor, claim in zip(floors, claims, strict=True)]
    level += left / growing
    for index, claim in enumerate(claims):
        shares[index] = max(floors[index], min(claim.most, level * claim.weight))
    return shares


def _whole(pages: int, shares: Sequence[float]) -> list[int]:
    """Round down, and give what that leaves over to the largest remainders."""
    whole = [int(share + 1e-9) for share in shares]
    left = pages - sum(whole)
    order = sorted(range(len(shares)), key=lambda i: whole[i] - shares[i])
    for given in range(left):
        whole[order[given % len(order)]] += 1
    return whole


def initial_quotas(profiles: Sequence[ModelProfile], pages: int) -> dict[str, int]:
    """Quotas of the models of one pool in proportion to their demand weights, no less than their floors.

    Raises:
        ValueError: the floors exceed the pool, or a rate is not positive.
    """
    claims = [Claim(demand_weight(profile), profile.floor_pages) for profile in profiles]
    return {p.name: q for p, q in zip(profiles, max_min(pages, claims), strict=True)}


def normalised_usage(pool: PoolState, profiles: Sequence[ModelProfile], used: Sequence[int]) -> list[float]:
    """R of Eq. 2 for each model, scaled so that 1.0 is the model's share of the pool by weight."""
    weights = [demand_weight(profile) for profile in profiles]
    whole = sum(weights)
    return [u * whole / (w * max(1, pool.room)) for u, w in zip(used, weights, strict=True)]


@dataclass(slots=True)
class QuotaConfig:
    """How quickly quotas follow the load. Fractions are of the pool. Every `period` seconds demand is looked at; for a
    request that needs more pages than its model may take, they follow after `hurried` seconds."""

    period: float = 0.5
    hurried: float = 0.02
    step: float = 0.1
    hysteresis: float = 0.02
    decay: float = 0.5


class QuotaAdapter:
    """Moves the quotas of one pool's models towards the fair division of what they can use.

    A quota is never lowered below what its model holds plus a block for each of its sequences, so that lowering one
    preempts nobody; `target` is where it is going, and admissions beyond the target wait. One move is at most a `step`
    of the pool per model, and moves smaller than the `hysteresis` are not made unless a model's oldest request waits
    for one. A retired model gives away all that it does not hold; one that is back gets its floor first. Floors give
    way to requests that need more than their model would get.
    """

    def __init__(self, pool: PoolState, config: QuotaConfig) -> None:
        self._pool = pool
        self._config = config
        self._demand = [0.0] * len(pool.models)
        self._weights = [demand_weight(model.profile) for model in pool.models]
        self.targets = [model.quota for model in pool.models]

    @property
    def settled(self) -> bool:
        """There is nothing to adapt: one model has the whole pool."""
        model, pages = self._pool.models[0], self._pool.room
        return len(self.targets) == 1 and not model.retired and model.quota == self.targets[0] == pages

    def adapt(self, between: bool = False) -> list[QuotaChange]:
        """The changes to make now. `between`: a request cannot wait for the next period, in which demand is looked at
        again."""
        pool, models, config = self._pool, self._pool.models, self._config
        pages = pool.room
        if not between:
            self._look_at_demand()
        serving = [index for index, model in enumerate(models) if not model.retired]
        self.targets = targets = [0] * len(models)
        floors = [0] * len(models)
        for index, target, floor in zip(serving, *self._division(serving), strict=True):
            targets[index], floors[index] = target, floor
        # What nobody holds is given at once to a request that cannot wait.
        step = pages if between else max(1, int(config.step * pages))
        quotas = [model.quota for model in models]
        for index, model in enumerate(models):
            held = model.used + model.promised + model.in_engines * model.pages_per_block
            least = 0 if model.retired else max(floors[index], quotas[index] - step)
            quotas[index] = min(quotas[index], max(targets[index], held, least))
        slack = pages - sum(quotas)
        starving = False
        for index in sorted(range(len(models)), key=lambda i: quotas[i] / max(1, targets[i])):
            missing = targets[index] - quotas[index]
            if missing <= 0:
                continue
            model = models[index]
            needed = max(self._head_needs(model), floors[index] - quotas[index])
            raised = min(missing, max(step, needed), max(0, slack))
            starving = starving or (needed > 0 and raised > 0)
            quotas[index] += raised
            slack -= raised
        moved = sum(abs(quota - model.quota) for quota, model in zip(quotas, models, strict=True))
        over = slack < 0
        if not (starving or over) and moved < 2 * config.hysteresis * pages:
            return []
        return [
            QuotaChange(model.name, quota) for quota, model in zip(quotas, models, strict=True) if quota != model.quota
        ]

    def _look_at_demand(self) -> None:
        decay = self._config.decay
        for index, model in enumerate(self._pool.models):
            wanted = float(self.wanted(model))
            self._demand[index] = max(wanted, decay * self._demand[index] + (1 - decay) * wanted)
            model.peak = model.used

    def _division(self, serving: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where the quotas of the models in service are going, and their floors."""
        pages = self._pool.room
        models = [self._pool.models[index] for index in serving]
        demands = [max(self._demand[index], float(self.wanted(self._pool.models[index]))) for index in serving]

        def divided(floors: Sequence[int]) -> list[int]:
            weights = (self._weights[index] for index in serving)
            return max_min(pages, [Claim(*each) for each in zip(weights, floors, demands, strict=True)])

        floors = fitting(pages, [model.profile.floor_pages for model in models])
        targets = divided(floors)
        for_long = long_request_floors(pages, models, targets)
        return (targets, floors) if for_long is None else (divided(for_long), for_long)

    @staticmethod
    def wanted(model: ModelState) -> int:
        """Pages that the model could use now: what it holds, room for its sequences to grow, and its queue as far as
        the decode engine has seats."""
        waiting = len(model.queue)
        seats = max(0, model.max_seqs - model.in_engines)
        queued = model.queue.blocks if waiting <= seats else model.queue.blocks * seats // waiting
        blocks = queued + model.in_engines + min(waiting, seats)
        return max(model.peak, model.used) + model.promised + blocks * model.pages_per_block

    @staticmethod
    def _head_needs(model: ModelState) -> int:
        """Pages that the oldest request lacks in its model's quota; 0 when it fits or nobody waits."""
        if not model.queue:
            return 0
        needed = (model.queue.head().blocks + model.in_engines) * model.pages_per_block
        return max(0, model.used + model.promised + needed - model.quota)


class Quotas(Protocol):
    """Which quotas a policy sets. Those of a pool sum to at most its pages."""

    due: float
    """When to rebalance even if nothing happens; infinity for never."""

    def rebalance(self, ledger: UnitLedger, now: float) -> list[QuotaChange]:
        """Quotas to change now, all at once. Cheap when nothing is due."""
        ...

    def limit(self, model: ModelState) -> int:
        """Pages up to which `model` admits requests now; less than its quota while that is being lowered."""
        ...

    def capacity(self, model: ModelState) -> int:
        """Most pages that `model` can ever be given, whoever shares its pool."""
        ...


def quota_when_back(model: ModelState) -> int:
    """The quota of a model that is back in service: as planned, as far as others have not been given it. They give it
    back by and by."""
    others = sum(other.quota for other in model.pool.models if other is not model)
    return max(model.quota, min(model.profile.quota_pages, model.pool.room - others))


# Between two changes of fixed quotas, seconds: what was lent comes back page by page.
LEND_SECONDS = 0.1


class FixedQuotas:
    """Every model keeps the quota that it was planned with; those of retired models are lent. Only for a request that
    needs more do the others give up a part of theirs, for as long as that takes."""

    def __init__(self) -> None:
        self.due = float("inf")
        self._lend_at = 0.0
        # By name of the model; empty while quotas are as planned.
        self._targets: dict[str, int] = {}

    def rebalance(self, ledger: UnitLedger, now: float) -> list[QuotaChange]:
        """See `Quotas`."""
        self.due = float("inf")
        if not ledger.memory_up or not (self._targets or any(map(_away_from_plan, ledger.models))):
            return []
        if now < self._lend_at:
            self.due = self._lend_at
            return []
        pools = [pool for pool in ledger.pools.values() if pool.models]
        self._targets = {name: pages for pool in pools for name, pages in fixed_targets(pool).items()}
        changes = [change for pool in pools for change in lend(pool, self._targets)]
        if changes:
            self._lend_at = now + LEND_SECONDS
        elif all(model.profile.quota_pages == self._targets[model.name] for model in ledger.models):
            self._targets = {}
        return changes

    def limit(self, model: ModelState) -> int:
        """See `Quotas`."""
        return min(model.quota, self._targets.get(model.name, model.quota))

    def capacity(self, model: ModelState) -> int:
        """See `Quotas`."""
        return model.pool.profile.pages


def _away_from_plan(model: ModelState) -> bool:
    """The model's quota is not the planned one, or should not be: also for a long request that is in an engine without
    pages, since it had to give them up and computes its prompt again."""
    planned = model.profile.quota_pages
    if model.quota != planned or model.retired:
        return True
    return max(head_pages(model), prompt_pages(model), model.used + model.promised) > planned


class AdaptiveQuotas:
    """Quotas follow the load, at most every `QuotaConfig.period` seconds; sooner for a request that needs more pages
    than its model may take now."""

    def __init__(self, config: QuotaConfig | None = None) -> None:
        self._config = config or QuotaConfig()
        self._adapters: list[QuotaAdapter] = []
        # By index of the model; empty until the first move.
        self._limits: list[int] = []
        self.due = 0.0
        # When the next period begins; from when on quotas may change before.
        self._period = self._between = 0.0
        # Of each pool, when quotas were looked at last.
        self._rooms: list[int] = []

    def rebalance(self, ledger: UnitLedger, now: float) -> list[QuotaChange]:
        """See `Quotas`."""
        between = now < self._period
        if not ledger.memory_up or (between and not self._short(ledger)):
            return []
        if now < self._between:
            self.due = self._between
            return []
        self._between = now + self._config.hurried
        self._rooms = [pool.room for pool in ledger.pools.values()]
        if not between:
            self._period = now + self._config.period
        self.due = self._period
        pools = [pool for pool in ledger.pools.values() if pool.models]
        if not self._adapters:
            self._adapters = [QuotaAdapter(pool, self._config) for pool in pools]
        if all(adapter.settled for adapter in self._adapters):
            return []
        changes = [change for adapter in self._adapters for change in adapter.adapt(between)]
        changed = {change.model: change.pages for change in changes}
        self._limits = [0] * len(ledger.models)
        for pool, adapter in zip(pools, self._adapters, strict=True):
            for model, target in zip(pool.models, adapter.targets, strict=True):
                self._limits[model.index] = min(target, changed.get(model.name, model.quota))
        if any(not model.retired and head_pages(model) > self._limits[model.index] for model in ledger.models):
            self.due = min(self._period, self._between)
        return changes

    def limit(self, model: ModelState) -> int:
        """See `Quotas`."""
        return min(model.quota, self._limits[model.index]) if self._limits else model.quota

    def capacity(self, model: ModelState) -> int:
        """See `Quotas`."""
        return model.pool.profile.pages

    def _short(self, ledger: UnitLedger) -> bool:
        """A pool has become larger or smaller, or a request waits that its model could not even take alone."""
        if self._rooms and self._rooms != [pool.room for pool in ledger.pools.values()]:
            return True
        for model in ledger.models:
            if model.queue and not model.retired and head_pages(model) > self.limit(model):
                return True
        return False


def fixed_targets(pool: PoolState) -> dict[str, int]:
    """Where fixed quotas belong: each model's own quota and, in proportion to it, what retired models have no use for;
    its floor at least. Where a request needs more, its model gets that, and the others less."""
    serving = [model for model in pool.models if not model.retired]
    planned = [model.profile.quota_pages for model in serving]
    floors = [model.profile.floor_pages for model in serving]

    def divided(pages: int, floors: Sequence[int]) -> list[int]:
        return max_min(pages, [Claim(max(1, own), floor) for own, floor in zip(planned, floors, strict=True)])

    planned_pages = sum(model.profile.quota_pages for model in pool.models)
    whole = min(pool.room, planned_pages)
    as_planned = len(serving) == len(pool.models) and whole == planned_pages
    targets = planned if as_planned else divided(whole, fitting(whole, floors))
    for_long = long_request_floors(pool.room, serving, targets)
    if for_long is not None:
        targets = divided(pool.room, for_long)
    return dict.fromkeys((model.name for model in pool.models), 0) | {
        model.name: pages for model, pages in zip(serving, targets, strict=True)
    }


def lend(pool: PoolState, targets: Mapping[str, int]) -> list[QuotaChange]:
    """The changes that bring the pool's quotas towards their `targets`; nothing when they are there.

    What was lent comes back as soon as its borrowers do not hold it any more: no quota is lowered under what its model
    holds and needs to grow, so that nobody is preempted for it.
    """
    if all(model.quota == targets[model.name] for model in pool.models):
        return []
    quotas: dict[str, int] = {}
    for model in pool.models:
        held = model.used + model.promised + model.in_engines * model.pages_per_block
        quotas[model.name] = min(model.quota, max(targets[model.name], held))
    slack = pool.room - sum(quotas.values())
    for model in sorted(pool.models, key=lambda model: quotas[model.name] / max(1, targets[model.name])):
        raised = max(0, min(targets[model.name] - quotas[model.name], slack))
        quotas[model.name] += raised
        slack -= raised
    return [QuotaChange(model.name, quotas[model.name]) for model in pool.models if quotas[model.name] != model.quota]
