"""Linear layers are packed when they have been read, out of memory that they use one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.nn import Module, ModuleList, Parameter

vllm_linear = pytest.importorskip("vllm.model_executor.layers.linear")
from muxserve.engine.cpu.weight_packing import packed_when_read  # noqa: E402

ROWS, COLUMNS = 6, 4


class Linear(Module):
    """A layer of two parts, as vLLM's with K and V: each is loaded into a half of the rows."""

    def __init__(self, rows: int = ROWS, bias: bool = False) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(rows, COLUMNS), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]
        if bias:
            self.bias = Parameter(torch.zeros(rows), requires_grad=False)
            self.bias.weight_loader = self.load  # type: ignore[attr-defined]
        self.quant_method = vllm_linear.UnquantizedLinearMethod.__new__(vllm_linear.UnquantizedLinearMethod)
        self.packed: torch.Tensor | None = None
        self.lay_at = 0

    def load(self, parameter: Parameter, loaded: torch.Tensor, part: int) -> None:
        half = parameter.shape[0] // 2
        parameter.data[part * half : (part + 1) * half].copy_(loaded)
        if parameter is self.weight:
            self.lay_at = parameter.data.data_ptr()


def pack(method: object, layer: Any) -> None:
    if layer.weight.ndim == 2:
        layer.packed = layer.weight.data.clone()
        layer.weight = Parameter(torch.empty(0), requires_grad=False)


@pytest.fixture(autouse=True)
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_linear.UnquantizedLinearMethod, "process_weights_after_loading", pack)


def read(layer: Any, parts: Iterable[int] = (0, 1), first: float = 0.0) -> None:
    for part in parts:
        own = layer.weight if layer.weight.ndim == 2 else layer.known
        layer.known = own
        own.weight_loader(own, torch.full((own.shape[0] // 2 or ROWS // 2, COLUMNS), first + part), part)


def expected(first: float = 0.0, rows: int = ROWS) -> torch.Tensor:
    return torch.tensor([first] * (rows // 2) + [first + 1.0] * (rows // 2))[:, None].expand(rows, COLUMNS)


def test_a_layer_that_a_checkpoint_has_twice_stays_as_it_was_packed() -> None:
    layer: Any = Linear()
    with packed_when_read(ModuleList([layer])):
        read(layer)
        # Whoever looks the parameter up now finds the one that stands for what was packed.
        layer.weight.weight_loader(layer.weight, torch.zeros(ROWS, COLUMNS))
    assert torch.equal(layer.packed, expected())


def test_a_layer_is_packed_with_its_last_part_and_the_next_one_has_its_memory() -> None:
    model = ModuleList([Linear() for _ in range(3)])
    with packed_when_read(model):
        for number, layer in enumerate(model):
            read(layer, [1], 10.0 * number)
            assert layer.packed is None
            read(layer, [0], 10.0 * number)
            assert layer.packed is not None
    for number, layer in enumerate(model):
        assert torch.equal(layer.packed, expected(10.0 * number))
    assert len({layer.lay_at for layer in model}) == 1


def test_layers_that_are_read_beside_each_other_do_not_share_memory() -> None:
    model = ModuleList([Linear(), Linear(2 * ROWS), Linear()])
    with packed_when_read(model):
        for part in (0, 1):
            for number, layer in enumerate(model):
                read(layer, [part], 10.0 * number)
    for number, layer in enumerate(model):
        assert torch.equal(layer.packed, expected(10.0 * number, len(layer.packed)))


def test_a_layer_with_a_bias_waits_for_it() -> None:
    layer = Linear(bias=True)
    bias: Any = layer.bias
    with packed_when_read(ModuleList([layer])):
        read(layer)
        assert layer.packed is None
        for part in (0, 1):
            bias.weight_loader(bias, torch.full((ROWS // 2,), 5.0 + part), part)
        assert layer.packed is not None
    assert torch.equal(bias.data, expected(5.0)[:, 0])


def test_what_is_not_read_wholly_keeps_what_was_read_and_is_left_to_vllm() -> None:
    whole, half = Linear(), Linear()
    with packed_when_read(ModuleList([half, whole])):
        read(half, [1])
        read(whole, first=20.0)
    assert half.packed is None
    assert torch.equal(half.weight.data[ROWS // 2 :], expected()[ROWS // 2 :])
    assert half.weight.weight_loader == half.load
    assert torch.equal(whole.packed, expected(20.0))


def test_a_part_that_a_checkpoint_has_twice_does_not_count_twice_nor_reach_the_next_layer() -> None:
    model = ModuleList([Linear(), Linear()])
    first, second = model
    with packed_when_read(model):
        read(first, [0, 0])
        assert first.packed is None
        read(first, [1])
        read(second, [0], 10.0)
        read(first, [0], 30.0)
        read(second, [1], 10.0)
    assert torch.equal(first.packed, expected())
    assert torch.equal(second.packed, expected(10.0))


def test_memory_that_a_layer_keeps_is_given_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_linear.UnquantizedLinearMethod, "process_weights_after_loading", lambda *_: None)
    model = ModuleList([Linear(), Linear()])
    with packed_when_read(model):
        for number, layer in enumerate(model):
            read(layer, first=10.0 * number)
    for number, layer in enumerate(model):
        assert torch.equal(layer.weight.data, expected(10.0 * number))


def test_another_kind_of_layer_is_left_alone() -> None:
    layer = Linear()
    layer.quant_method = object()
    own = layer.weight.weight_loader
    with packed_when_read(ModuleList([layer])):
        assert layer.weight.weight_loader == own
