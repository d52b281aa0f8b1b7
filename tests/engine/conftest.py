"""What the tests of engines share: the answers of stock vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.harness import MODELS, ROOT


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stock vLLM's answers to all cases, by model and case."""
    out = tmp_path_factory.mktemp("stock")
    command = [sys.executable, "-m", "tests.engine.stock", str(out), *map(str, MODELS.values())]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return {name: json.loads((out / f"{path.name}.json").read_text()) for name, path in MODELS.items()}
