"""Turns: models that have requests and cannot be awake together decode one after the other, for a while each, and go
on later where they stopped (Aegaeon, SOSP'25: switching between models at the level of tokens).

`residency` says who is awake, and who has to go for another. A model that has to go finishes what runs, which may take
longer than those who wait can wait. Here is decided when it stops before that: its turn is over. A turn is as long as
its tokens last at the pace that clients are promised: meanwhile the others have their turns, and no client notices.

Pure: it takes the models and the time, and answers whose turns are over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

# Tokens last until the model's next turn if they do for so many times what waking it takes: another is woken first.
_AHEAD = 2.0
# A step counts as no shorter than this part of the time between tokens, or a turn could have no length.
_SHORTEST_STEP = 0.01


@dataclass(frozen=True, slots=True)
class TurnRules:
    """A turn is at most `longest` seconds long (Q_MAX), and a round of turns at most the part `first_token` of what a
    first token may take, since who comes new waits for a turn as well; unless more than the part `switching` of the
    time would be spent on switches: then turns are longer. Where less than the part `worthwhile` of the tokens would be
    in time, there are no turns: models are served one after the other, so that some requests are in time rather than
    none. A request that was stopped gives way to new ones for `standstill` seconds at most. Where wakes are work of the
    processor that steps are computed on, it has so many `cores`, and a wake takes one of them (0: wakes take nothing
    from steps).

    Raises:
        ValueError: a number that makes no sense.
    """

    longest: float = 4.0
    first_token: float = 0.8
    switching: float = 0.5
    worthwhile: float = 0.5
    cores: int = 0
    standstill: float = 20.0

    def __post_init__(self) -> None:
        if not (self.longest > 0.0 and self.first_token > 0.0 and min(self.cores, self.standstill) >= 0):
            raise ValueError("the longest turn and round must be above zero, and cores and standstill not below")
        if not 0.0 < self.switching < 1.0 or not 0.0 <= self.worthwhile <= 1.0:
            raise ValueError("switching and worthwhile are parts of a whole")


@dataclass(frozen=True, slots=True)
class TurnModel:
    """A model that wants turns. Its clients are promised a first token within `ttft` seconds, and then one every
    `tpot`; a step of its batch takes `step` seconds (0: not known), waking it `switch` seconds, and it takes the part
    `memory` of what there is for models."""

    name: str
    ttft: float
    tpot: float
    step: float
    switch: float
    memory: float = 1.0

    @property
    def gain(self) -> float:
        """Seconds for which the tokens last that a second of its turn makes (n)."""
        return self.tpot / max(self.step, _SHORTEST_STEP * self.tpot)


@dataclass(frozen=True, slots=True)
class TurnRound:
    """A round in which each model has one turn: seconds of each turn (`lengths`, by model) and of the whole round, and
    the part of the tokens that will be in time."""

    lengths: Mapping[str, float]
    seconds: float
    attainment: float


def turn_round(models: Collection[TurnModel], rules: TurnRules) -> TurnRound:
    """How long the models' turns are.

    Aegaeon's batched scheduling of the decoding phase (its section 4, equation 2): with d the time between tokens
    (`tpot`) and t the time of a step, n = d / t, and c the time that a round spends on switches,

        q_i = c / (n_i * (alpha - sum_k 1 / n_k)),   alpha = max(c / (min_k n_k * Q_MAX) + sum_k 1 / n_k, 0.5).

    A turn of q_i makes tokens for n_i * q_i seconds, which is the same for all models; a round takes alpha times as
    long, so that the part 1 / alpha of the tokens is in time.

    Four things are our own. One model at a time has the device there; here as many are awake as the memory holds: one
    that takes the part m_i of it counts with that, c = sum m_i c_i and sum m_k / n_k, which with m = 1 is the equation
    above. Prompts have devices of their own there; here a new one waits for its model's turn, so that a round is no
    longer than first tokens allow. Turns are no shorter than `TurnRules.switching` asks for. And where wakes compute,
    steps have what is left of the cores: with less than the turns need, fewer tokens are in time.
    """
    if not models:
        return TurnRound({}, 0.0, 1.0)
    switches = sum(each.memory * each.switch for each in models)
    load = sum(each.memory / each.gain for each in models)
    # Seconds that the tokens of each turn last: n_i * q_i.
    lasts = min(each.gain for each in models) * rules.longest
    alpha = max(switches / lasts + load, 0.5)
    if alpha > load:
        lasts = min(lasts, switches / (alpha - load))
    lasts = min(lasts, max(0.0, rules.first_token * min(each.ttft for each in models) - switches) / load)
    lasts = max(lasts, switches * (1.0 - rules.switching) / (rules.switching * load))
    seconds = switches + lasts * load
    attainment = min(1.0, lasts / seconds) if seconds > 0.0 else 1.0
    needed = lasts * sum(1.0 / each.gain for each in models)
    if rules.cores and needed > 0.0:
        left = rules.cores * seconds - sum(each.switch for each in models)
        attainment *= min(1.0, max(0.0, left) / needed)
    return TurnRound({each.name: lasts / each.gain for each in models}, seconds, attainment)


@dataclass(frozen=True, slots=True)
class TurnStanding:
    """How a model that has requests stands. It has been awake since `awake_since` (None: it is not), and is `leaving`
    when it has to go for another; so many of its requests are `running`. Others `wait` for it to be awake: new ones,
    and such that its last turn has left."""

    model: TurnModel
    awake_since: float | None = None
    leaving: bool = False
    running: int = 0
    waits: bool = False


def turns_over(now: float, standings: Sequence[TurnStanding], rules: TurnRules) -> list[str]:
    """The models whose running requests are to stop now and to wait for the next turn: those that have to go for
    another, and have had the turn of `turn_round`. What runs goes on while nobody waits."""
    going = [each for each in standings if each.leaving and each.running]
    if not going or not any(each.waits and each.awake_since is None for each in standings):
        return []
    found = turn_round([each.model for each in standings if each.running or each.waits], rules)
    if found.attainment < rules.worthwhile:
        return []
    return [
        each.model.name
        for each in going
        if each.awake_since is not None and now - each.awake_since >= found.lengths[each.model.name]
    ]


# ---------------------------------------------------------------- requests whose turn is over


@dataclass(frozen=True, slots=True)
class StoppedRequest:
    """A request that has stood still since `at`; its client is to have its next token by `due`."""

    at: float
    due: float


def next_due(arrival: float, made: int, ttft: float, tpot: float) -> float:
    """By when the client of a request that came at `arrival` is to have its next token, after the `made` that it
    has."""
    return arrival + ttft + made * tpot


def waiting_since(
    now: float, stopped: Collection[StoppedRequest], rules: TurnRules, ttft: float, switch: float, others: bool
) -> list[float]:
    """From when on each request that was stopped counts as waiting, as `residency.Standing` has it.

    Not before it was stopped, and the later the more tokens its client has in advance: from then on it is to be served
    within `ttft` seconds, as one that is new. If `others` wait, new ones for models that sleep, none counts while there
    is time for two switches more, of `switch` seconds: nobody new loses a turn to those that had theirs. But none
    stands still for more than `TurnRules.standstill` for that, however many tokens its client has: then it has waited
    all the time.
    """
    since = [each.at if now - each.at >= rules.standstill else max(each.at, each.due - ttft) for each in stopped]
    if since and others and min(since) + ttft - now > _AHEAD * switch:
        return []
    return since
