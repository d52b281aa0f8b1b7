"""Stock vLLM's command starts where vLLM is installed under another name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from muxserve.vllm.pin import VLLM_VERSION

ROOT = Path(__file__).resolve().parents[2]


def test_it_starts(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    (recipe,) = re.findall(
        r"printf '(.*)' \"\$\(abspath \$\(BIN\)/python\)\" > \$\(BIN\)/vllm", (ROOT / "Makefile").read_text()
    )
    script.write_text(recipe.replace("\\n", "\n") % sys.executable)
    script.chmod(0o755)
    ended = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-1].split("+")[0] == VLLM_VERSION
