"""Random small models and configurations; a seed stands for one case."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bitwright.palettization import (
    KMeansPalettizer,
    KMeansPalettizerConfig,
    ModuleKMeansPalettizerConfig,
    PalettizationSpec,
)
from bitwright.palettization.spec import PerGroupedChannelGranularity
from bitwright.pruning import MagnitudePruner, MagnitudePrunerConfig, ModuleMagnitudePrunerConfig, PruningSpec
from bitwright.quantization import ModuleQuantizerConfig, QuantizationSpec, Quantizer, QuantizerConfig
from bitwright.quantization.spec import PerBlockGranularity, PerChannelGranularity, PerTokenGranularity

from .random_blocks import BLOCK_NETWORKS, Image
from .random_networks import NETWORKS as WHOLE_NETWORKS
from .random_networks import Assorted, ConvStack

NETWORKS = [*WHOLE_NETWORKS, *BLOCK_NETWORKS]

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)]
FLOATS = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]


@dataclass
class Case:
    """One model with its configuration.

    Attributes:
        name: what was drawn, for messages.
        model: float model in eval mode.
        inputs: inputs of it.
        compress: prepares a copy of the model.
        has_activations: whether activations are quantized.
        mode: in which it is prepared.
    """

    name: str
    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    compress: Any
    has_activations: bool
    mode: str


def _granularity(rng, kind):
    roll = rng.random()
    if kind in (ConvStack, Assorted, Image):
        return PerChannelGranularity(axis=0) if roll < 0.6 else None
    if roll < 0.4:
        return PerChannelGranularity(axis=rng.choice([0, 0, 1]))
    if roll < 0.75:
        return PerBlockGranularity(axis=rng.choice([1, 1, 0]), block_size=rng.choice([32, 8, 16]))
    return PerBlockGranularity(block_size=rng.choice([(8, 8), (4, 32)])) if roll < 0.85 else None


def _weight_spec(rng, kind):
    dtype = rng.choice(["int8", "int4", *INTEGERS, *FLOATS])
    options: dict[str, Any] = {}
    granularity = _granularity(rng, kind)
    if granularity is not None:
        options["granularity"] = granularity
    if dtype in FLOATS:
        if dtype.startswith("float4") or rng.random() < 0.4:
            options["scale_dtype"] = "float8_e8m0fnu"
    else:
        options["qscheme"] = rng.choice(["symmetric", "asymmetric"])
        if dtype[-1] != "1" and rng.random() < 0.2:
            options["qscheme"] = "symmetric_with_clipping"
        options["qformulation"] = rng.choice(["zp", "zp", "minval"])
    return QuantizationSpec(dtype=dtype, **options)


def _activation_spec(rng):
    roll = rng.random()
    if roll < 0.35:
        return None
    if roll < 0.6:
        return QuantizationSpec(dtype=rng.choice(["int8", "uint8"]), qscheme=rng.choice(["symmetric", "asymmetric"]))
    options: dict[str, Any] = {}
    dtype = rng.choice(["int8", "uint8", "int4", "uint4", "int6", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
    if dtype.startswith("float"):
        if dtype.startswith("float4"):
            options["scale_dtype"] = rng.choice(["float8_e8m0fnu", None])
            options["granularity"] = PerBlockGranularity(axis=-1, block_size=8)
    else:
        options["qscheme"] = rng.choice(["symmetric", "asymmetric", "symmetric_with_clipping"])
        options["qformulation"] = rng.choice(["zp", "minval"])
    if "granularity" not in options and rng.random() < 0.3:
        options["granularity"] = rng.choice([PerChannelGranularity(axis=-1), PerTokenGranularity()])
    if rng.random() < 0.25 or isinstance(options.get("granularity"), PerTokenGranularity):
        options["qparam_calculator_cls"] = "dynamic"
        if options.get("qscheme") == "symmetric_with_clipping":
            options["qscheme"] = "symmetric"
    return QuantizationSpec(dtype=dtype, **options)


def _palette_spec(rng):
    options: dict[str, Any] = {"n_bits": rng.randint(1, 8)}
    if rng.random() < 0.3:
        options["granularity"] = PerGroupedChannelGranularity(axis=rng.choice([0, 0, 1]), group_size=rng.choice([2, 4]))
    if rng.random() < 0.25:
        options["n_bits"], options["cluster_dim"] = rng.choice([(2, 2), (4, 2), (3, 4)])
    if rng.random() < 0.3:
        dtype, scheme = rng.choice([("int8", "symmetric"), ("uint8", "asymmetric"), ("float8_e4m3fn", "symmetric")])
        options["lut_qspec"] = QuantizationSpec(dtype=dtype, qscheme=scheme)
    if rng.random() < 0.3 and "cluster_dim" not in options:
        options["enable_per_channel_scale"] = True
    return PalettizationSpec(**options)


def _quantized(model, inputs, weight, activation, mode):
    specs = None if activation is None else {"*": activation}
    config = QuantizerConfig(
        global_config=ModuleQuantizerConfig(
            op_state_spec=None if weight is None else {"weight": weight}, op_input_spec=specs, op_output_spec=specs
        ),
        execution_mode=mode,
    )
    quantizer = Quantizer(model, config)
    ready = quantizer.prepare(inputs)
    if activation is not None:
        with quantizer.calibration_mode(), torch.no_grad():
            ready(*inputs)
    return quantizer, ready


def _palettized(model, inputs, spec):
    module = ModuleKMeansPalettizerConfig(op_state_spec={"weight": spec}, enable_fast_kmeans_mode=False)
    palettizer = KMeansPalettizer(model, KMeansPalettizerConfig(global_config=module))
    return palettizer, palettizer.prepare(inputs)


def _pruned(model, inputs, sparsity):
    module = ModuleMagnitudePrunerConfig(op_state_spec={"weight": PruningSpec(target_sparsity=sparsity)})
    pruner = MagnitudePruner(model, MagnitudePrunerConfig(global_config=module))
    return pruner, pruner.prepare(inputs)


def random_case(seed, networks=NETWORKS):
    """The case of a seed, with one of some networks; its configuration may be one that the model does not allow."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.choice(networks)
    dtype = rng.choice([torch.float32] * 6 + [torch.float16, torch.bfloat16])
    model = kind(rng).eval().to(dtype)
    inputs = model.inputs(dtype)
    technique = rng.choice(["quantize"] * 5 + ["palettize"] * 2 + ["prune", "prune, quantize", "palettize, quantize"])
    weight, activation = _weight_spec(rng, kind), _activation_spec(rng)
    palette, sparsity = _palette_spec(rng), rng.choice([0.02, 0.5, 0.8])
    mode = rng.choice(["eager", "graph"]) if technique == "quantize" else "eager"
    if technique == "prune, quantize" and rng.random() < 0.3:
        technique = "prune, palettize"
    stacked = "," in technique and rng.random() < 0.6
    if technique.endswith(", quantize") and rng.random() < 0.4:
        mode = "graph"

    def compress():
        twin, compressor = copy.deepcopy(model), None
        if "prune" in technique:
            compressor, twin = _pruned(twin, inputs, sparsity)
            if technique != "prune" and not stacked:
                twin = compressor.finalize(backend="_torch")
        if "palettize" in technique:
            compressor, twin = _palettized(twin, inputs, palette)
            if technique.startswith("palettize, ") and not stacked:
                twin = compressor.finalize(backend="_torch")
        if "quantize" in technique:
            chosen = None if "palettize" in technique else weight
            return _quantized(twin, inputs, chosen, activation, mode)
        return compressor, twin

    parts = [f"seed {seed}", kind.__name__, str(dtype).removeprefix("torch."), technique]
    if stacked:
        parts.append("on the prepared model")
    if "quantize" in technique:
        parts += [mode, f"weight {_short(weight)}", f"activation {_short(activation)}"]
    if "palettize" in technique:
        parts.append(f"palette {_short(palette)}")
    has_activations = "quantize" in technique and activation is not None
    return Case(", ".join(parts), model, inputs, compress, has_activations, mode)


def _short(spec):
    if spec is None:
        return None
    names = sorted(spec.model_fields_set - {"fake_quantize_cls", "qparam_calculator_cls", "range_calculator_cls"})
    fields = {name: getattr(spec, name) for name in names}
    return " ".join(
        f"{name}={_short(value) if name == 'lut_qspec' and value else value}" for name, value in fields.items()
    )
