"""One colour per model, wherever it is drawn: in reports, on the live page, in `muxserve top`. Pure.

The first six can be told apart by those who do not see all colours (Okabe and Ito).
"""

from __future__ import annotations

from collections.abc import Iterable

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#8a63d2", "#d64550", "#7a9a2e", "#a0725a"),
)
GREY = "#808890"


def colours_of(models: Iterable[str]) -> dict[str, str]:
    """The colour of each model of a fleet, in its order. Beyond the palette they come again."""
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(dict.fromkeys(models))}
