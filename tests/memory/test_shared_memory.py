"""A /dev/shm that is too small, or that is full later: an error in words, never a SIGBUS.

In a mount namespace of its own, where /dev/shm is a tmpfs of a few MiB.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muxserve.memory import MemoryManagerError, server
from muxserve.memory._native import ModelConfig
from muxserve.memory.client import MemoryClient
from tests.memory.support import assert_balanced, model, unit_spec

ROOT = Path(__file__).resolve().parents[2]
PAGES = 20_001  # of 64 bytes: a pool of 1.25 MiB


def in_small_shared_memory(scenario: str, mebibytes: int, run_dir: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a mount namespace")
    mount = f'mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm && exec "$0" "$@"'
    command = [unshare, "-rm", "sh", "-c", mount, sys.executable, "-m", __name__, scenario, str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def too_small(run_dir: Path) -> None:
    of = unit_spec(run_dir, PAGES, [model("a", 1, 1, PAGES, 1000)])
    with pytest.raises(
        RuntimeError, match=r"status 3: .*MiB of shared memory, /dev/shm has 1 MiB left: make the pools"
    ):
        server.start(of)
    assert [path.name for path in Path("/dev/shm").glob("*.pool.*")] == []


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def full_later(run_dir: Path) -> None:
    of = unit_spec(run_dir, PAGES, [model("a", 1, 1, PAGES, 20_000)])
    process = server.start(of)
    with MemoryClient(of.memory_socket, "client", timeout_s=60) as client:
        with pytest.raises(OSError, match="No space left"):
            fill(Path("/dev/shm/other"))
        # Every entry of the page table is written now.
        assert len(client.step("a", reserve=PAGES - 1).reserved) == PAGES - 1
        with pytest.raises(MemoryManagerError, match="was not added: cannot reserve 1 MiB of shared memory") as error:
            client.add_model(ModelConfig("b", "p", layers=1, kv_heads=1, num_blocks=PAGES, quota_pages=0))
        assert error.value.code == "NO_MEMORY"
        assert process.poll() is None
        assert_balanced(client)
        Path("/dev/shm/other").unlink()
        client.add_model(ModelConfig("b", "p", layers=1, kv_heads=1, num_blocks=PAGES, quota_pages=0))
    process.terminate()
    assert process.wait(60) == 0


SCENARIOS = {"too_small": too_small, "full_later": full_later}


@pytest.mark.parametrize(("scenario", "mebibytes"), [("too_small", 1), ("full_later", 2)])
def test_shared_memory_that_does_not_do_is_an_error_in_words(scenario: str, mebibytes: int, tmp_path: Path) -> None:
    in_small_shared_memory(scenario, mebibytes, tmp_path)


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
