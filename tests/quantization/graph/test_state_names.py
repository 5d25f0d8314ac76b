"""Names in the state of a quantized graph, and which of them a state that is loaded may lack."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bitwright import ExportBackend
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity

ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
BLOCKS_OF_3 = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=3))


class Tied(nn.Module):
    """Two layers with one weight, a layer under two names, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.twin = self.a
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.twin(self.b(self.a(x))))


def simulators(model: nn.Module) -> list[str]:
    """Names of the simulators of a graph."""
    return [name for name, _ in model.named_children() if name.startswith("activation_post_process_")]


@pytest.mark.parametrize(
    ("widths", "specs", "unused"),
    [
        ((8, 6), {"op_state_spec": {"weight": BLOCKS_OF_3}}, (1,)),
        ((6, 8), {"op_input_spec": {"*": BLOCKS_OF_3}, "op_output_spec": {"*": BLOCKS_OF_3}}, (2, 4)),
    ],
)
@pytest.mark.filterwarnings("ignore::bitwright.errors.ConfigMatchWarning")
def test_blocks_that_do_not_fit_leave_their_numbers_unused(
    widths: tuple[int, int], specs: dict[str, Any], unused: tuple[int, ...]
) -> None:
    """As in coreai-opt, which inserts such simulators first, so that a state of a graph finds its simulators."""
    model = nn.Sequential(nn.Linear(*widths), nn.ReLU(), nn.Linear(widths[1], 8))
    config = QuantizerConfig(global_config=ModuleQuantizerConfig(**specs))
    prepared = Quantizer(model, config).prepare((torch.randn(2, widths[0]),))
    assert simulators(prepared) == [f"activation_post_process_{n}" for n in range(5) if n not in unused]


def _without(state: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


@pytest.mark.parametrize("lacks", [("a.weight", "a.bias"), ("b.weight", "twin.weight"), ("bn.num_batches_tracked",)])
def test_a_state_may_lack_what_is_known(lacks: tuple[str, ...]) -> None:
    """All names of a tied tensor are there; one of them is enough to load, and no count of batches is needed."""
    torch.manual_seed(0)
    quantizer = Quantizer(Tied(), QuantizerConfig())
    prepared = quantizer.prepare((ROWS,))
    assert prepared.state_dict().keys() >= Tied().state_dict().keys()
    with torch.no_grad():
        prepared.a.weight.mul_(2)
    state = _without(prepared.state_dict(), lacks)
    other = Quantizer(Tied(), QuantizerConfig()).prepare((ROWS,))
    other.load_state_dict(state)
    torch.testing.assert_close(other(ROWS), prepared(ROWS), rtol=0, atol=0)
    nested = nn.Sequential(copy.deepcopy(prepared))
    nested.load_state_dict({f"0.{name}": value for name, value in state.items()})
    started = Quantizer(Tied(), QuantizerConfig()).prepare((ROWS,), state_dict=state)
    torch.testing.assert_close(started(ROWS), prepared(ROWS), rtol=0, atol=0)
    finalized = quantizer.finalize(prepared, backend=ExportBackend._TORCH)
    assert finalized.state_dict().keys() >= {"a.weight", "b.weight", "twin.weight"}


def test_a_tensor_without_any_of_its_names_is_missing() -> None:
    """All of the names are told."""
    prepared = Quantizer(Tied(), QuantizerConfig()).prepare((ROWS,))
    state = _without(prepared.state_dict(), ("a.weight", "b.weight", "twin.weight"))
    with pytest.raises(RuntimeError, match=r'"a\.weight", "b\.weight", "twin\.weight"'):
        prepared.load_state_dict(state)
