"""Starts the memory manager of a unit's spec."""

from __future__ import annotations

import hashlib
import os
import re
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from muxserve.memory import _native
from muxserve.net.heartbeat import heartbeat_file
from muxserve.spec import PRETENDED_PAGE_BYTES, ModelSpec, PoolSpec, UnitSpec

_SHARED_MEMORY = Path("/dev/shm")
# What an engine had launched on a GPU when it was killed may go on writing for about a step.
LINGER_MS = 500
BINARY = "muxserve-memory-manager"


def prefix(unit_spec: UnitSpec) -> str:
    """What the names of the unit's shared memory segments start with: the same after every restart."""
    place = hashlib.sha256(os.path.abspath(unit_spec.run_dir).encode()).hexdigest()[:12]
    unit = re.sub(r"[^A-Za-z0-9_-]", "-", unit_spec.unit)[:64]
    return f"muxserve-{place}-{unit}"


def manager_config(unit_spec: UnitSpec) -> _native.Config:
    """The memory manager's configuration; the manager checks its values when it starts."""
    gpu, simulated = unit_spec.gpu, unit_spec.simulated
    pretended = simulated is not None and bool(simulated.gpus)
    return _native.Config(
        prefix=prefix(unit_spec),
        ranks=unit_spec.ranks,
        device="posix" if gpu is None else "cuda",
        devices=[] if gpu is None else gpu.uuids,
        ipc="auto" if gpu is None else gpu.ipc,
        pools=[_pool(pool, pretended) for pool in unit_spec.pools],
        models=[_model(model, model.quota_pages) for model in unit_spec.models],
    )


def _pool(pool: PoolSpec, pretended: bool) -> _native.PoolConfig:
    page_bytes, chunk_bytes = pool.page_bytes, pool.chunk_bytes
    if pretended:  # the pages of a GPU that is not there take no memory to speak of
        page_bytes = PRETENDED_PAGE_BYTES
        chunk_bytes = page_bytes * pool.chunk_pages if chunk_bytes else 0
    return _native.PoolConfig(pool.name, page_bytes, pool.num_pages, chunk_bytes, pool.start_pages)


def _model(model: ModelSpec, quota_pages: int) -> _native.ModelConfig:
    return _native.ModelConfig(
        name=model.name,
        pool=model.pool,
        # A model without KV has a page table, too, and takes no pages.
        layers=model.layers if model.kv_heads else 1,
        kv_heads=model.kv_heads or 1,
        num_blocks=model.num_blocks,
        quota_pages=quota_pages,
        windowed_layers=list(model.windowed_layers),
        window_blocks=_window_blocks(model),
    )


def _window_blocks(model: ModelSpec) -> int:
    if not model.windowed_layers:
        return 0
    # A token sees the `window` - 1 before it; behind a cached prefix they begin at a block's end.
    return max(1, -(-(model.window - 1) // model.block_tokens))


def add_model(unit_spec: UnitSpec, model: str) -> None:
    """Let the running manager of `unit_spec` have that model of it, too, which gets its quota later.

    Raises:
        MemoryManagerGone: it cannot be reached.
        MemoryManagerError: it does not take the model.
    """
    from muxserve.memory.client import MemoryClient

    with MemoryClient(unit_spec.memory_socket, "host") as client:
        client.add_model(_model(unit_spec.model(model), quota_pages=0))


def binary() -> Path:
    """The server's executable.

    Raises:
        FileNotFoundError: the package was installed without it.
    """
    path = Path(_native.__file__).parent / "bin" / BINARY
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: install muxserve again (pip install .)")
    return path


def command(unit_spec: UnitSpec, *, die_with_parent: bool = True, options: Sequence[str] = ()) -> list[str]:
    """Write the configuration file and return the command line that starts the manager; `options` are its limits, such
    as "--stall-s", "5"."""
    config = Path(unit_spec.run_dir) / "memory.config"
    config.write_bytes(manager_config(unit_spec).encode())
    beats = heartbeat_file(unit_spec.run_dir, "memory")
    line = [str(binary()), "--socket", unit_spec.memory_socket, "--config", str(config)]
    line += ["--heartbeat", str(beats)]
    if unit_spec.gpu is not None:
        line += ["--linger-ms", str(LINGER_MS)]
    line += options
    return [*line, "--die-with-parent"] if die_with_parent else line


def wait_ready(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Read the manager's standard output until it says that it listens; returns its generation.

    Raises:
        RuntimeError: it ended instead; the message says why if its standard error is a pipe.
        TimeoutError: it did neither in time.
    """
    assert process.stdout is not None
    end = time.monotonic() + timeout_s
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"the memory manager was not ready within {timeout_s} s")
        got = os.read(process.stdout.fileno(), 4096)
        if not got:
            status = process.wait()
            why = process.stderr.read().decode(errors="replace").strip() if process.stderr is not None else ""
            raise RuntimeError(f"the memory manager ended with status {status}: {why or 'see its log'}")
        text += got
    return int(text.split()[1])


def start(
    unit_spec: UnitSpec,
    *,
    die_with_parent: bool = True,
    options: Sequence[str] = (),
    timeout_s: float = 40.0,
    stderr: int | IO[Any] | None = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start the manager of `unit_spec` and wait until it listens. Stop it with SIGTERM.

    Args:
        die_with_parent: it stops when the thread that called this ends.
        options: see `command`.
        stderr: where its messages go; by default they become part of the error if it does not start.

    Raises:
        RuntimeError: it did not start; the message says why.
        TimeoutError: it was not ready in time. It waits up to 30 s for engines that still write into the pool.
    """
    process = subprocess.Popen(
        command(unit_spec, die_with_parent=die_with_parent, options=options), stdout=subprocess.PIPE, stderr=stderr
    )
    try:
        wait_ready(process, timeout_s)
    except BaseException:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        raise
    return process


def remove_segments(unit_spec: UnitSpec) -> None:
    """Remove the shared memory that a killed manager has left. Only when no manager of the unit runs."""
    for path in _SHARED_MEMORY.glob(f"{prefix(unit_spec)}.*"):
        path.unlink(missing_ok=True)
