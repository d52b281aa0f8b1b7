"""LoRA adapters as engines know them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.exceptions import VLLMValidationError

from muxserve.gateway.front_end.adapters import adapter_requests, for_engines


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(b"1")
    return path


def test_every_gateway_gives_an_adapter_the_same_number_and_other_weights_another(
    tmp_path: Path, weights: Path
) -> None:
    named = {"one": str(tmp_path), "two": str(tmp_path)}
    first = adapter_requests("m", named)
    assert adapter_requests("m", named)["one"].lora_int_id == first["one"].lora_int_id
    assert first["one"].lora_int_id != first["two"].lora_int_id
    # Prefixes of the one before must not be found: block hashes have the name and the path.
    before = for_engines(first["one"]).lora_name
    os.utime(weights, ns=(1, 1))
    after = for_engines(adapter_requests("m", named)["one"])
    assert after.lora_name != before
    assert after.lora_name.startswith("one#")
    assert after.lora_path == str(tmp_path)


def overwritten(path: Path) -> None:
    path.write_bytes(b"other weights")


def replaced(path: Path) -> None:
    """As an editor or rsync does: another file of the same size and time under the same name."""
    stat = path.stat()
    other = path.with_name("new")
    other.write_bytes(b"2")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [overwritten, replaced])
def test_files_that_change_under_a_served_adapter_are_another_one(
    tmp_path: Path, weights: Path, change: Callable[[Path], None]
) -> None:
    """Nobody adds the adapter again: the next request brings another number, and with it other block hashes."""
    served = adapter_requests("m", {"one": str(tmp_path)})["one"]
    before = for_engines(served)
    assert for_engines(served) == before
    change(weights)
    after = for_engines(served)
    assert after.lora_int_id != before.lora_int_id
    assert after.lora_name != before.lora_name


def test_an_adapter_whose_files_are_gone_is_no_matter_of_the_others(tmp_path: Path, weights: Path) -> None:
    """Otherwise no name and no adapter of its model could be changed any more, and the model be offered nowhere."""
    served = adapter_requests("m", {"one": str(tmp_path), "gone": str(tmp_path / "gone")})
    assert served["gone"].lora_int_id != served["one"].lora_int_id
    assert for_engines(served["one"]).lora_name.startswith("one#")
    with pytest.raises(VLLMValidationError, match="'gone' cannot be served: its files cannot be read"):
        for_engines(served["gone"])
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / weights.name).write_bytes(b"back")
    assert for_engines(served["gone"]).lora_name.startswith("gone#")


def test_files_that_are_gone_are_named(tmp_path: Path, weights: Path) -> None:
    served = adapter_requests("m", {"one": str(tmp_path)})["one"]
    weights.unlink()
    with pytest.raises(VLLMValidationError, match=f"'one' cannot be served: its files cannot be read .*{tmp_path}"):
        for_engines(served)
