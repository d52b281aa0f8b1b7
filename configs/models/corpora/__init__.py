"""The corpora that the quickstart models learn: one closed domain each, written from templates and a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import arithmetic, atlas, frontdesk
from .documents import Document

BUILDERS: dict[str, Callable[[random.Random, int], list[Document]]] = {
    "arithmetic": arithmetic.build,
    "atlas": atlas.build,
    "frontdesk": frontdesk.build,
}

__all__ = ["BUILDERS", "Document"]
