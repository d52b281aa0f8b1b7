"""Where the decodes of a member go that is to leave: Llumnix's terminating instance (arXiv:2406.03243, section 4.4.3),
by what rolling prefill asks of a member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from muxserve.rolling.member import LatencyTargets, MacroMember


def takes(member: MacroMember, source: MacroMember, objectives: LatencyTargets, now: float) -> bool:
    """Whether `member` may take decodes of `source` over. They bring their KV, and need no prefill.

    Memory: the least of them fits into what is not promised.
    Their TPOT: they have saved at least the prefills that are pending there.
    TPOT of those that decode there, whose steps get longer by each that comes: they are not late as it is.
    """
    if member.leaving or member is source:
        return False
    least = min((each.tokens for each in source.requests.values() if each.prefilled), default=None)
    if least is None or member.promised + least > member.capacity:
        return False
    if member.pending_seconds > max(0.0, source.saved(now, objectives.spared)):
        return False
    return member.saved(now, objectives.spared) >= 0.0


def destinations(
    leaving: Iterable[MacroMember],
    members: Iterable[MacroMember],
    objectives: LatencyTargets,
    now: float,
    before: Mapping[str, str],
    alike: Callable[[str, str], bool],
) -> dict[str, str]:
    """Which member takes the decodes of each that leaves, by name; none for those that had better finish them.

    A destination stays while it may (`before`). A new one is where the least prefill is pending, of equals where most
    of the memory is left. One member takes decodes of one other at a time.

    Args:
        alike: whether KV can go from one to the other.
    """
    free = list(members)
    pairs: dict[str, str] = {}
    # Those that have a destination choose first, or it could be taken away by another.
    for source in sorted(leaving, key=lambda each: (each.name not in before, each.name)):
        able = [each for each in free if takes(each, source, objectives, now) and alike(source.name, each.name)]
        known = before.get(source.name)
        chosen = min(
            able,
            key=lambda m: (m.name != known, m.pending_seconds, m.promised / m.capacity, m.name),
            default=None,
        )
        if chosen is not None:
            pairs[source.name] = chosen.name
            free.remove(chosen)
    return pairs
