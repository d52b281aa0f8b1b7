"""To be run with an installed MuxServe, and nothing else of this repository: do its extension module and its memory
manager work?"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from muxserve.memory import _native, server
from muxserve.memory.client import MemoryClient


def main() -> None:
    """Reserve blocks from a memory manager."""
    with tempfile.TemporaryDirectory() as directory:
        socket, config = Path(directory, "socket"), Path(directory, "config")
        config.write_bytes(
            _native.Config(
                prefix=f"muxserve-installed-{os.getpid()}", ranks=1, device="posix", devices=[], ipc="auto",
                pools=[_native.PoolConfig("p", 64, 101)],
                models=[_native.ModelConfig("a", "p", layers=2, kv_heads=3, num_blocks=20, quota_pages=60)],
            ).encode()
        )  # fmt: skip
        line = [server.binary(), "--socket", socket, "--config", config, "--die-with-parent"]
        process = subprocess.Popen(line, stdout=subprocess.PIPE)
        server.wait_ready(process, 60)
        with MemoryClient(str(socket), "installed") as client:
            pages = client.map("a").page_table[client.step("a", reserve=3).reserved]
            assert len(set(pages.reshape(-1).tolist())) == 18
        process.terminate()
        assert process.wait(60) == 0
    print(_native.__file__)


if __name__ == "__main__":
    main()
