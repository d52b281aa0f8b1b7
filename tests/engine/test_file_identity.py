"""What engines compute from files depends on what the files are, not only on their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils

from muxserve.engine.cpu.adapters import OtherAdapterError, check_files
from muxserve.vllm.file_identity import adapter_number, identity, salt_block_hashes


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    return tmp_path


def touched(path: Path) -> None:
    os.utime(path / "model.safetensors", ns=(5, 5))


def grown(path: Path) -> None:
    (path / "config.json").write_text("another configuration")


def added(path: Path) -> None:
    (path / "model-2.safetensors").touch()


def test_it_is_the_same_as_long_as_the_files_are(checkpoint: Path) -> None:
    assert identity(str(checkpoint)) == identity(str(checkpoint))
    one = checkpoint / "model.safetensors"
    assert identity(str(one)) == identity(str(one))
    with pytest.raises(FileNotFoundError, match="has no adapter_"):
        identity(str(checkpoint), "adapter_*")


@pytest.mark.parametrize("change", [touched, grown, added])
def test_blocks_of_other_weights_have_other_hashes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    def first_hash() -> bytes:
        monkeypatch.setenv("PYTHONHASHSEED", "4711")
        salt_block_hashes(str(checkpoint))
        # Python itself reads it when an engine starts workers.
        assert 0 <= int(os.environ["PYTHONHASHSEED"]) < 1 << 32
        kv_cache_utils.init_none_hash(sha256_cbor)
        return bytes(kv_cache_utils.hash_block_tokens(sha256_cbor, None, [1, 2, 3]))

    before = first_hash()
    assert first_hash() == before, "an engine that is started again finds what the one before computed"
    change(checkpoint)
    assert first_hash() != before


# ------------------------------------------------------------ adapters


class Adapter:
    """The directory of an adapter, and a worker that loads what is there."""

    def __init__(self, path: Path, copied: bool) -> None:
        self.path = path
        self.file = path / "adapter_model.safetensors"
        self.file.write_text("old")
        self.while_loading: Callable[[], object] = lambda: None
        self.manager: Any = SimpleNamespace(_load_adapter=self._load)
        check_files(self.manager, copied)

    def _load(self, request: LoRARequest) -> str:
        text = self.file.read_text()
        self.while_loading()
        return text

    def request(self, number: int = 0) -> LoRARequest:
        """As a gateway sends it now."""
        number = number or adapter_number("poet", str(self.path))
        return LoRARequest(lora_name=f"poet#{number:x}", lora_int_id=number, lora_path=str(self.path))


@pytest.mark.parametrize("copied", [False, True])
def test_an_evicted_adapter_is_not_loaded_from_files_that_were_overwritten(tmp_path: Path, copied: bool) -> None:
    adapter = Adapter(tmp_path, copied)
    # A machine with copies knows nothing of the gateway's files.
    request = adapter.request(number=7 if copied else 0)
    assert adapter.manager._load_adapter(request) == "old"
    assert adapter.manager._load_adapter(request) == "old"
    adapter.file.write_text("overwritten")
    with pytest.raises(OtherAdapterError, match=r"files of the adapter 'poet' in .* were overwritten"):
        adapter.manager._load_adapter(request)
    assert adapter.manager._load_adapter(adapter.request(number=8 if copied else 0)) == "overwritten"


def test_an_adapter_that_is_overwritten_before_it_was_loaded_first_is_noticed(tmp_path: Path) -> None:
    adapter = Adapter(tmp_path, copied=False)
    request = adapter.request()
    adapter.file.write_text("overwritten")
    with pytest.raises(OtherAdapterError):
        adapter.manager._load_adapter(request)


@pytest.mark.parametrize("copied", [False, True])
def test_an_adapter_that_is_overwritten_while_it_is_loaded_is_noticed(tmp_path: Path, copied: bool) -> None:
    adapter = Adapter(tmp_path, copied)
    request = adapter.request()
    adapter.while_loading = lambda: adapter.file.write_text("half of the new one")
    with pytest.raises(OtherAdapterError):
        adapter.manager._load_adapter(request)
