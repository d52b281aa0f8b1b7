"""What holds for all tests."""

import os
from typing import Any

# torch in the tests' own processes computes with one thread, as MuxServe's processes do. Threads that spin at the
# barriers of small operations take the cores of what runs beside, and take ten times as long where those are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Why a test failed the first time, where it was run again: it is a defect all the same."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first run of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
