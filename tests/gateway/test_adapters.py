"""LoRA adapters as engines know them."""

from __future__ import annotations

import os
from pathlib import Path

from muxserve.gateway.adapters import adapter_requests, for_engines


def test_every_gateway_gives_an_adapter_the_same_number_and_other_weights_another(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"1")
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
