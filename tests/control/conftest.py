from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def base() -> Iterator[Path]:
    """Where fleets have their directories; short, as Unix sockets need it."""
    with tempfile.TemporaryDirectory(prefix="mx") as directory:
        yield Path(directory) / "muxserve"
