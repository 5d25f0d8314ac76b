"""The public surface: what coreai-opt 0.3 documents is there, and every public name is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import pkgutil

import pytest

import bitwright

from .source_imports import imports, modules

PEER_NAMES = {
    "bitwright": "CoreMLExportError DependencyVersionWarning ExportBackend TorchaoTorchIncompatibilityWarning "
    "UntestedTorchVersionWarning __version__",
    "bitwright.common": "CompressionType CoreMLExportError ExportBackend",
    "bitwright.config": "CompressionConfig CompressionSpec CompressionType ModuleCompressionConfig "
    "OpCompressionConfig WeightOnlyModuleValidationMixin WeightOnlyOpValidationMixin",
    "bitwright.config.spec": "CompressionComponentFactoryBase CompressionSimulatorBase CompressionSpec "
    "CompressionTargetTensor CompressionType",
    "bitwright.quantization": "ExecutionMode InvalidExecutionModeError ModuleQuantizerConfig QuantizationSpec "
    "Quantizer QuantizerConfig",
    "bitwright.quantization.config": "ExecutionMode InvalidExecutionModeError KVCacheQuantConfig ModuleQuantizerConfig "
    "OpQuantizerConfig QATSchedule QuantizerConfig",
    "bitwright.quantization.spec": "DynamicQParamsCalculator GlobalMinMaxQParamsCalculator MinMaxRangeCalculator "
    "MovingAverageQParamsCalculator PerBlockGranularity PerChannelGranularity PerTensorGranularity "
    "QParamsCalculatorBase QuantizationComponentFactory QuantizationFormulation QuantizationGranularity "
    "QuantizationScheme QuantizationSpec "
    "RangeCalculatorBase RunningRangeMixin StatefulQParamsCalculatorBase StatelessQParamsCalculatorBase "
    "StaticQParamsCalculator default_activation_quantization_spec default_weight_quantization_spec fp4_forward "
    "resolve_block_sizes",
}


def public_modules() -> list[str]:
    found = ["bitwright"]
    for info in pkgutil.walk_packages(bitwright.__path__, "bitwright."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            found.append(info.name)
    return found


@pytest.mark.parametrize("module", PEER_NAMES)
def test_names_of_the_peer_are_there(module):
    """Code that imports a documented name of coreai-opt imports it here."""
    names = PEER_NAMES[module].split()
    namespace = importlib.import_module(module)
    assert [name for name in names if not hasattr(namespace, name)] == []
    if module != "bitwright.quantization.spec":
        assert set(names) <= set(namespace.__all__)


PEER_PATHS = {
    "bitwright.casting.casting": "cast_fp32_to_fp16 cast_int32_to_int16 cast_to_16_bit_precision",
    "bitwright.config.spec.base": "CompressionSpec",
    "bitwright.inspection.model_inspector": "ModelInspector",
}


@pytest.mark.parametrize("module", PEER_PATHS)
def test_names_of_the_peer_are_there_under_its_module_paths_too(module):
    package = importlib.import_module(module.rpartition(".")[0])
    for name in PEER_PATHS[module].split():
        assert getattr(importlib.import_module(module), name) is getattr(package, name)


PEER_ARGUMENTS = {
    ("bitwright.quantization", "QuantizerConfig.from_yaml"): "yml",
    ("bitwright.quantization", "QuantizerConfig.get_module_config"): "self name module",
    ("bitwright.casting", "cast_fp32_to_fp16"): "exported_program ignored_ops",
    ("bitwright.casting", "cast_int32_to_int16"): "exported_program",
    ("bitwright.casting", "cast_to_16_bit_precision"): "exported_program ignored_ops",
    ("bitwright.inspection", "ModelInspector.get_matched_ops_for_op_name"): "self pattern",
    ("bitwright.inspection", "ModelInspector.get_matched_ops_for_op_type"): "self op_type",
    ("bitwright.inspection", "ModelInspector.get_matched_ops_for_module_name"): "self module_name",
    ("bitwright.quantization.spec.fake_quantize", "FakeQuantizeImplBase.get_block_size"): "self tensor_shape",
    ("bitwright.pruning.spec.prune", "PruneImplBase.update_sparsity"): "self step_count",
}


@pytest.mark.parametrize(("module", "function"), PEER_ARGUMENTS)
def test_arguments_have_the_names_of_the_peer(module, function):
    """Code that passes them as keywords runs; further ones of ours come behind."""
    found = operator.attrgetter(function)(importlib.import_module(module))
    names = PEER_ARGUMENTS[module, function].split()
    assert list(inspect.signature(found).parameters)[: len(names)] == names


@pytest.mark.parametrize("module", public_modules())
def test_public_names_exist_and_are_documented(module):
    """Each public module has a docstring and an ``__all__`` whose names exist and have docstrings."""
    try:
        namespace = importlib.import_module(module)
    except ImportError as error:
        named = "pip install" in str(error) or getattr(error, "name", None) == "triton"
        if not named:
            raise
        pytest.skip("needs a package that is not installed, which its error names")
    assert namespace.__doc__
    for name in getattr(namespace, "__all__", []):
        value = getattr(namespace, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"


def test_what_modules_import_from_each_other_is_public_there():
    """A name without an underscore that another module imports stands in its module's ``__all__``, where it has one."""
    trees = modules()
    listed = {module: names for module, tree in trees.items() if (names := _listed(tree)) is not None}
    missing = {
        f"{source}.{name}"
        for module, tree in trees.items()
        for source, name in imports(tree, module)
        if source in listed and not name.startswith("_") and name not in listed[source]
    }
    assert sorted(missing - set(trees)) == []


def _listed(tree: ast.Module) -> set[str] | None:
    """The names in ``__all__``; None without one."""
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return set(ast.literal_eval(statement.value))  # type: ignore[attr-defined]
    return None
