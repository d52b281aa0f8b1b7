"""Which of a fleet's models a trace's request goes to, where the trace names none of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

from muxserve.workload.arrivals import power_law_rates
from muxserve.workload.errors import WorkloadError

Mapper = Callable[[str | None], str]
UNNAMED = "model"
_WAYS = "rates, round-robin, power:ALPHA, or pairs such as gpt-4=large,*=small"


def make_mapper(how: str, models: Sequence[str], rates: Mapping[str, float] | None, seed: int) -> Mapper:
    """A function from the trace's name of a model (None: it names none) to one of `models`.

    `how` is one of:

    - `auto`: names that are among `models` stay; others go by the rates.
    - `rates`: each request is drawn with the models' rates as weights (evenly without rates).
    - `round-robin`: the models in turn.
    - `power:ALPHA`: drawn, the k-th model with weight k^-ALPHA.
    - `OLD=NEW,...`: by name; `*` stands for all others and for requests without a name.

    Draws are from `seed`. Without `models` names stay as they are.

    Raises:
        WorkloadError: `how` is none of these or names unknown models; when called, a name that no pair covers.
    """
    if not models:
        if how != "auto":
            raise WorkloadError(f"to map requests to models ({how}) say which models: a fleet, or --models")
        return lambda name: name or UNNAMED
    if "=" in how:
        return _by_name(how, models)
    if how == "round-robin":
        turn = itertools.cycle(models)
        return lambda name: next(turn)
    if how in ("auto", "rates"):
        draw = _draw(models, [1.0 if rates is None else rates[model] for model in models], seed)
        known = frozenset(models) if how == "auto" else frozenset()
        return lambda name: name if name is not None and name in known else draw()
    kind, _, alpha = how.partition(":")
    if kind == "power":
        try:
            weights = power_law_rates(models, 1.0, float(alpha))
        except ValueError:
            raise WorkloadError(f"{how!r} needs an exponent of at least 0, e.g. power:0.9") from None
        drawn = _draw(models, list(weights.values()), seed)
        return lambda name: drawn()
    raise WorkloadError(f"{how!r} is no way to map models; there are {_WAYS}")


def _draw(models: Sequence[str], weights: Sequence[float], seed: int) -> Callable[[], str]:
    if not math.fsum(weights) > 0:
        raise WorkloadError("at least one model needs a rate above 0")
    rng = random.Random(f"{seed}/models")
    summed = list(itertools.accumulate(weights))
    return lambda: rng.choices(models, cum_weights=summed)[0]


def _by_name(how: str, models: Sequence[str]) -> Mapper:
    pairs: dict[str, str] = {}
    for part in how.split(","):
        # A model's name may hold an equals sign; ours may not, so the last one separates.
        old, equals, new = part.strip().rpartition("=")
        if not equals or not old or new not in models:
            raise WorkloadError(f"{part.strip()!r} is no pair OLD=NEW with NEW among {', '.join(models)}")
        pairs[old] = new

    def mapper(name: str | None) -> str:
        new = pairs.get(name or "*") or pairs.get("*")
        if new is None:
            raise WorkloadError(
                f"no pair maps the model {name!r} of the trace; add {name}=NAME or *=NAME for all others"
                if name
                else "the trace has requests without a model; add *=NAME"
            )
        return new

    return mapper
