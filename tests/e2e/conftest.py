import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import ROOT
from tests.e2e.reference import MODELS


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stock vLLM's answers, one model after the other in a process of its own."""
    answers: dict[str, Any] = {}
    for model in MODELS:
        out: Path = tmp_path_factory.mktemp("reference") / "answers.json"
        command = [sys.executable, "-m", "tests.e2e.reference", str(out), str(ROOT / "configs/models" / model)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        answers |= json.loads(out.read_text())
    return answers
