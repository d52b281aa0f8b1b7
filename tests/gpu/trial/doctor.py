"""`muxserve doctor --gpu` with a fleet whose engines have 70 and 10 % of the SMs.

    python -m tests.gpu.trial.doctor FILE

Whatever makes such fleets answer wrongly, the probe of their models' shapes is to find it. The findings are copied to
FILE.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from muxserve.gpu.findings import Findings, default_file
from tests.e2e.fleet import fleet_file
from tests.gpu.trial.fleets import PERCENTAGES, SHARES
from tests.gpu.trial.runner import finding


def main() -> int:
    """Exit code: that of `muxserve doctor --gpu`."""
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        fleet = fleet_file(Path(folder), SHARES, cluster=PERCENTAGES)
        code = subprocess.run([sys.executable, "-m", "muxserve.cli.app", "doctor", "--gpu", str(fleet)]).returncode
    shutil.copy(default_file(), out)
    for each in msgspec.json.decode(out.read_bytes(), type=Findings).findings:
        finding(f"{each.verdict}: {each.probe}: {each.detail}")
    return code


if __name__ == "__main__":
    sys.exit(main())
