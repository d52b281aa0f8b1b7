import json
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.fleet import ROOT
from tests.e2e.reference import MODELS


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stock vLLM's answers, one model after the other."""
    out = tmp_path_factory.mktemp("reference")
    models = [str(ROOT / "configs/models" / model) for model in MODELS]
    command = [sys.executable, "-m", "tests.e2e.reference", str(out), *models]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return {model: json.loads((out / f"{model}.json").read_text()) for model in MODELS}
