"""How many examples a property is tried with that takes long for each: a whole simulated world, a real process.

The numbers in tests are those of `pytest --hypothesis-profile=long`. Properties are tried with the same examples every
time: a change that breaks one breaks it in the first few as a rule. More of them are for who changes what they test.
"""

from __future__ import annotations

import math

from hypothesis import settings

LONG = "long"
_PART = 0.4


def examples(count: int) -> int:
    """`count` in the long profile, and two in five of them otherwise."""
    return count if settings.get_current_profile_name() == LONG else math.ceil(count * _PART)
