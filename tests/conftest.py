"""What holds for all tests."""

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Generator
from typing import Any

import pytest

from tests.support import segments
from tests.support.thoroughness import LEVEL, THOROUGH

segments.watch_directories()

# torch in the tests' own processes computes with one thread, as MuxServe's processes do. Threads that spin at the
# barriers of small operations take the cores of what runs beside, and take ten times as long where those are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Properties are tried with the same examples every time, so that a run says of a change what the run before it did not;
# MUXSERVE_NEW_EXAMPLES=1 looks for others. How long an example takes says nothing on a machine that does other things.
# How many there are: tests/support/thoroughness.py.
with contextlib.suppress(ImportError):  # where only the tests on a GPU run
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "tests",
        derandomize=not os.environ.get("MUXSERVE_NEW_EXAMPLES"),
        deadline=None,
        max_examples=25 if LEVEL == "quick" else 100,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for other levels, unless a test was asked for by its name."""
    if THOROUGH or any("::" in each for each in config.args):
        return
    others = ("thorough",) if LEVEL == "usual" else ("thorough", "slow")
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in others)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Why a test failed the first time, where it was run again: it is a defect all the same."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first run of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a failed test shared with others, a fleet for instance, may be as the test left it: paused, or without some
    of its processes. It is ended, so that the test's next run and the tests after it have it made anew."""
    report = yield
    if not report.failed or call.when == "teardown" or not isinstance(item, pytest.Function):
        return report
    for name, fixture in item._request._fixture_defs.items():
        if fixture.scope == "function" or not fixture.baseid.startswith("tests"):
            continue
        try:
            fixture.finish(item._request)
        except Exception:
            report.sections.append((f"ending the fixture {name}", traceback.format_exc()))
    return report


EXIT_SECONDS = 20.0


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """All is told and every fixture has ended. What a failed test left open, a ZeroMQ context for instance, may wait
    for ever when it is collected: then say where, and end."""

    def end() -> None:
        sys.stdout.flush()
        faulthandler.dump_traceback(sys.__stderr__)
        os._exit(_status[-1])

    if _status:
        timer = threading.Timer(EXIT_SECONDS, end)
        timer.daemon = True
        timer.start()


_status: list[int] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a session that leaves shared memory behind, and remember what it came to."""
    left = segments.left()
    if left:
        segments.remove(left)
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.section("shared memory was left behind")
            for path, directory in sorted(left.items()):
                reporter.write_line(f"{path}, of {directory}")
        if exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    _status.append(int(session.exitstatus))
