"""Exported models: int8 against float in ONNX Runtime, and PyTorch with packed int4 weights against float.

Run ``python -m benchmarks.export [onnx] [packed]``. ONNX Runtime: the same model as float file and as W8A8 file, on the
CPU with two threads, alternating in one process; the ratio of both outputs' difference to the output tells that the
right thing was timed, and ``codes`` how many codes of the file are not PyTorch's or those of exact sums, each quantizer
for itself. Packed: bytes of the loaded model, and forwards with weights decoded on use. Writes
``results/onnx.json`` and ``results/packed.json``.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from _measure import alternate, ratio, timed, write_json

RESULTS = Path(__file__).parent / "results"
THREADS = 2


class Residual(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.two = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.two(torch.relu(self.one(x))))


class Block(nn.Module):
    """A layer of a transformer encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(n, t, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, t, c))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def convnet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A residual network of 9 convolutions for images of 64 × 64, batch 4."""

    def down(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    layers = [down(3, 64), Residual(64), down(64, 128), Residual(128), down(128, 256), Residual(256)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))
    return model.eval(), (torch.randn(4, 3, 64, 64),)


def transformer() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Four encoder layers of width 384 on 4 × 128 vectors."""
    return nn.Sequential(*(Block(384, 6) for _ in range(4))).eval(), (torch.randn(4, 128, 384),)


def layers_only(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """The model with int8 weights, and uint8 at the inputs of its linear layers only."""
    from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
    from bitwright.quantization.config import OpQuantizerConfig
    from bitwright.quantization.spec import PerChannelGranularity

    activation = QuantizationSpec(dtype="uint8", qscheme="asymmetric")
    weight = QuantizationSpec(dtype="int8", granularity=PerChannelGranularity(axis=0))
    linear = OpQuantizerConfig(
        op_input_spec={"*": activation}, op_output_spec={"*": activation}, op_state_spec={"weight": weight}
    )
    module = ModuleQuantizerConfig(
        op_input_spec=None, op_output_spec=None, op_state_spec=None, op_type_config={"linear": linear}
    )
    quantizer = Quantizer(model, QuantizerConfig(global_config=module, execution_mode="graph"))
    prepared = quantizer.prepare(inputs)
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(*inputs)
    return prepared


def int8(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """The model with int8 weights per channel and uint8 activations, calibrated on ``inputs``."""
    from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
    from bitwright.quantization.spec import PerChannelGranularity

    activation = QuantizationSpec(dtype="uint8", qscheme="asymmetric")
    weight = QuantizationSpec(dtype="int8", granularity=PerChannelGranularity(axis=0))
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_input_spec={"*": activation}, op_output_spec={"*": activation}, op_state_spec={"weight": weight}
        ),
        execution_mode="graph",
    )
    quantizer = Quantizer(model, config)
    prepared = quantizer.prepare(inputs)
    with quantizer.calibration_mode(), torch.no_grad():
        prepared(*inputs)
    return prepared


def sqnr(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Signal to noise in dB."""
    noise = (expected.double() - found.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise.clamp(min=1e-300)))


def onnx(folder: Path) -> dict[str, Any]:
    """Float and int8 files of both models in ONNX Runtime."""
    from bitwright.export.onnx import compare_codes, export_onnx
    from bitwright.export.onnx.runtime import open_session

    results: dict[str, Any] = {}
    for name, build, quantize in (
        ("convnet", convnet, int8),
        ("transformer", transformer, int8),
        ("transformer, linear layers only", transformer, layers_only),
    ):
        torch.manual_seed(0)
        model, inputs = build()
        prepared = quantize(model, inputs)
        files = {
            "float": export_onnx(model, inputs, folder / "float.onnx"),
            "w8a8": export_onnx(prepared, inputs, folder / "w8a8.onnx"),
        }
        sessions = {key: open_session(path, threads=THREADS) for key, path in files.items()}
        feeds = {key: {session.get_inputs()[0].name: inputs[0].numpy()} for key, session in sessions.items()}

        def call(key: str, sessions: Any = sessions, feeds: Any = feeds) -> Callable[[], object]:
            return lambda: sessions[key].run(None, feeds[key])

        times = alternate({key: timed(call(key)) for key in files}, repeats=15, warmup=3)
        with torch.no_grad():
            found = torch.from_numpy(sessions["w8a8"].run(None, feeds["w8a8"])[0])
            ratio_db = sqnr(prepared(*inputs), found)
        report = compare_codes(prepared, files["w8a8"], inputs)
        results[name] = {
            "threads": THREADS, "seconds": times, "float_over_w8a8": ratio(times["float"], times["w8a8"]),
            "sqnr_db_against_prepared": ratio_db, "codes": str(report),
            "bytes": {key: path.stat().st_size for key, path in files.items()},
        }  # fmt: skip
        print(f"{name:32s} float {times['float'].median * 1e3:8.2f} ms   w8a8 {times['w8a8'].median * 1e3:8.2f} ms   "
              f"{results[name]['float_over_w8a8']:.2f} x   {ratio_db:.1f} dB\n  {report}")  # fmt: skip
    return results


def packed(folder: Path) -> dict[str, Any]:
    """Transformers with int4 weights in blocks of 32 inputs: bytes in memory, and time of forwards.

    A BERT of 35 million parameters, whose linear layers have a row for each output, and a GPT-2 of 50 million, whose
    layers have a row for each input. From one token, where codes are multiplied, to 1024.
    """
    import transformers

    torch.manual_seed(0)
    bert = transformers.BertConfig(
        vocab_size=8000, hidden_size=640, num_hidden_layers=6, num_attention_heads=10, intermediate_size=2560,
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(vocab_size=8000, n_layer=6, bos_token_id=0, eos_token_id=0, use_cache=False)
    return {
        "BERT": _packed(transformers.BertModel(bert).eval()),
        "GPT-2": _packed(transformers.GPT2LMHeadModel(gpt2).eval()),
    }


def _packed(model: nn.Module) -> dict[str, Any]:
    from bitwright.export.torch_program import packed_copy
    from bitwright.quantization import Quantizer, QuantizerConfig

    name = type(model).__name__
    sizes = ((1, 1), (1, 16), (1, 128), (8, 16), (8, 128))
    inputs = {f"{batch} x {count}": torch.randint(0, 8000, (batch, count)) for batch, count in sizes}
    dense = sum(tensor.nbytes for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values())
    quantizer = Quantizer(copy.deepcopy(model), QuantizerConfig.presets.w4_per_block(execution_mode="eager"))
    prepared = quantizer.prepare((inputs["1 x 16"],))
    small = packed_copy(prepared)
    held = sum(tensor.nbytes for tensor in {id(t): t for t in small.state_dict(keep_vars=True).values()}.values())
    results: dict[str, Any] = {"float_bytes": dense, "packed_bytes": held, "share": held / dense, "tokens": {}}
    with torch.no_grad():
        for count, tokens in inputs.items():
            forms = {"float": model, "packed": small}
            calls = {key: timed(lambda form=form, tokens=tokens: form(tokens)) for key, form in forms.items()}
            times = alternate(calls, repeats=5 if tokens.numel() > 500 else 15, warmup=2)
            results["tokens"][count] = {
                "seconds": times, "float_over_packed": ratio(times["float"], times["packed"]),
                "sqnr_db_against_prepared": sqnr(prepared(tokens)[0], small(tokens)[0]),
            }  # fmt: skip
            print(f"packed W4 {name}, {count} tokens: float {times['float'].median * 1e3:.1f} ms, "
                  f"packed {times['packed'].median * 1e3:.1f} ms")  # fmt: skip
            sys.stdout.flush()
    print(f"{held:,} of {dense:,} bytes ({held / dense:.3f})")
    return results


def main(names: list[str]) -> None:
    """Run the named parts, or both."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    with tempfile.TemporaryDirectory() as folder:
        for name, part in (("onnx", onnx), ("packed", packed)):
            if not names or name in names:
                write_json(RESULTS / f"{name}.json", part(Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
