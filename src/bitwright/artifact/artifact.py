"""The artifact: what compression produced, for no target in particular."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.kept_layouts import finalized_for, finalized_words
from bitwright._utils.own_states import asks_for_states, list_own_states

from .activations import QuantizedActivation
from .compress import compress_tensor
from .errors import ArtifactError
from .folded_norms import FoldedNorms
from .from_graph import graph_tensors
from .graph_sites import GraphSimulators
from .manifest import Manifest, StoredActivation, StoredTensor, library_versions, read_manifest, write_manifest
from .sites import WeightSite, activation_simulators, dense_state, own_state, weight_sites
from .storage import DEFAULT_SHARD_BYTES, StoredTensors, TensorWriter, check_files, file_sizes, read_activations
from .tensors import CompressedTensor, DenseTensor

__all__ = ["Artifact", "make_empty_directory"]


class Artifact(Mapping[str, CompressedTensor[Any]]):
    """The tensors of a compressed model by name, packed, with the parameters of its activation quantizers.

    A mapping from the names of the float model's parameters and buffers to compressed tensors; what stood under no
    simulator is there uncompressed. Made by :meth:`from_model` or :meth:`load`.

    Attributes:
        activations: activation quantizers by module path.
        aliases: further names of tensors (tied weights), to the name that they are stored under.
        config: the compressor's configuration as JSON-compatible data, or None.
        plan: the plan as JSON-compatible data, or None.
        versions: versions of the libraries that wrote the artifact.

    Example:
        >>> artifact = Artifact.from_model(torch.nn.Linear(2, 3))
        >>> artifact["weight"].shape, artifact.decode("weight").dtype
        ((3, 2), torch.float32)
    """

    def __init__(
        self,
        tensors: Mapping[str, CompressedTensor[Any]],
        *,
        aliases: Mapping[str, str] | None = None,
        activations: Mapping[str, QuantizedActivation] | None = None,
        config: Any = None,
        plan: Any = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self._tensors = tensors
        self.aliases = dict(aliases or {})
        self.activations = dict(activations or {})
        self.config = config
        self.plan = plan
        self.versions = dict(versions or library_versions())

    @classmethod
    def from_model(cls, model: nn.Module, *, config: Any = None, plan: Any = None, lazy: bool = False) -> Artifact:
        """Pack the weights of a prepared model.

        Args:
            model: a model that a compressor prepared, eager or graph. It is not changed. In a graph, batch norms that
                were folded are part of the weights.
            config: the compressor's configuration, kept for the record: an object with ``to_dict`` or ``model_dump``,
                or JSON-compatible data.
            plan: the plan, likewise.
            lazy: compress each tensor when it is asked for, so that a model that is mapped from disk never is in memory
                as a whole; it must then not change before the artifact is saved.

        Raises:
            ArtifactError: a weight cannot be stored so that it decodes to what the model computes, or an activation was
                not calibrated. The message names it. Or the model was finalized for a backend.
        """
        target = finalized_for(model)
        if target is not None:
            raise ArtifactError(f"{finalized_words(target)} Make the artifact of the prepared model.")
        if isinstance(model, fx.GraphModule) and (GraphSimulators.of(model) or not weight_sites(model)):
            packed, names, ranges = graph_tensors(model)
            return cls(packed, aliases=names, activations=ranges, config=_as_json(config), plan=_as_json(plan))
        aliases: dict[str, str] = {}
        sources: dict[str, WeightSite] = {}
        for site in weight_sites(model):
            sources[site.name] = site
            aliases.update(dict.fromkeys(site.names[1:], site.name))
        seen: dict[int, str] = {}
        for name, tensor in dense_state(model):
            first = seen.setdefault(id(tensor), name)
            if first != name:
                aliases[name] = first
            else:
                sources[name] = WeightSite([_split(name)], tensor)
        activations = {
            path: QuantizedActivation.from_simulator(simulator, path)
            for path, simulator in activation_simulators(model).items()
        }
        tensors: Mapping[str, CompressedTensor[Any]] = _ModelTensors(sources)
        if not lazy:
            tensors = dict(tensors)
        return cls(tensors, aliases=aliases, activations=activations, config=_as_json(config), plan=_as_json(plan))

    @classmethod
    def load(cls, directory: str | Path) -> Artifact:
        """Open an artifact on disk; tensors are read when asked for and stay mapped to their file.

        Sizes and hashes of all files are compared with the manifest first. Nothing in them is executed.

        Raises:
            ArtifactError: a file is missing, damaged, of an unknown version, or holds what the manifest does not say.
        """
        folder = Path(directory)
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        return cls(
            StoredTensors(folder, manifest),
            aliases=manifest.aliases,
            activations=read_activations(folder, manifest),
            config=manifest.config,
            plan=manifest.plan,
            versions=manifest.versions,
        )

    def save(self, directory: str | Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        """Write safetensors files and ``manifest.json``, tensor by tensor; the manifest comes last.

        Args:
            directory: a folder that is empty or does not exist.
            shard_bytes: a new file is begun when one holds that much; also what is held in memory at most, plus one
                tensor.

        Raises:
            NotADirectoryError: ``directory`` is a file.
            FileExistsError: it is not empty.
        """
        folder = Path(directory)
        make_empty_directory(folder)
        writer = TensorWriter(folder, shard_bytes)
        tensors, activations = {}, {}
        for name in self._tensors:
            tensor = self._tensors[name]
            tensors[name] = StoredTensor(file=writer.add(name, tensor.parts), layout=tensor.layout)
        for name, activation in self.activations.items():
            file = writer.add(f"activations/{name}", activation.parts) if activation.parts else 0
            activations[name] = StoredActivation(file=file, layout=activation.layout)
        writer.flush()
        write_manifest(
            folder,
            Manifest(
                versions=self.versions, files=writer.files, tensors=tensors, aliases=self.aliases,
                activations=activations, config=self.config, plan=self.plan,
            ),
        )  # fmt: skip

    def __getitem__(self, name: str) -> CompressedTensor[Any]:
        try:
            return self._tensors[self.aliases.get(name, name)]
        except KeyError:
            raise KeyError(f"The artifact has no tensor {name!r}.") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def decode(self, name: str) -> torch.Tensor:
        """Return the dense tensor: bit for bit what the prepared model computed for it.

        Raises:
            KeyError: no such tensor.
            ArtifactError: its numbers are out of range.
        """
        return self[name].decode()

    @property
    def compressed(self) -> tuple[str, ...]:
        """Names of the tensors that are not stored as they were."""
        return tuple(name for name, layout in self._layouts() if layout.kind != "dense" or layout.kept is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, on disk and in memory; activations and the manifest not counted."""
        return sum(layout.nbytes for _, layout in self._layouts())

    @property
    def compressed_nbytes(self) -> int:
        """Bytes of the compressed tensors; what the plan predicts."""
        names = set(self.compressed)
        return sum(layout.nbytes for name, layout in self._layouts() if name in names)

    @property
    def disk_nbytes(self) -> int:
        """Bytes of the tensor files that :meth:`save` writes, with their headers; the manifest not counted."""
        activations = ((f"activations/{name}", entry.layout) for name, entry in self.activations.items())
        return sum(file_sizes((*self._layouts(), *activations)))

    def load_into(self, model: nn.Module) -> nn.Module:
        """Copy the decoded tensors into a float model, one at a time.

        Args:
            model: a model with the parameters and buffers that the artifact names. Changed in place. Batch norms that
                graph mode folded into the artifact's weights are replaced by ``nn.Identity``.

        Returns:
            ``model``.

        Raises:
            ArtifactError: a tensor of the model is missing in the artifact or the other way round, or a shape differs.
                The model is unchanged then.
        """
        targets = self._fitting_state(model)
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self.decode(name))
        return model

    def packed_model(self, model: nn.Module) -> nn.Module:
        """Give a float model the packed weights, which are decoded on use.

        Args:
            model: as in :meth:`load_into`; may be on the meta device, where buffers that no state dict holds
                (``persistent=False``) stay and want values before it runs. Changed in place: its compressed parameters
                become packed buffers, the others are copied.

        Returns:
            ``model``, in eval mode.

        Raises:
            ArtifactError: as :meth:`load_into`.
        """
        from .packed import pack_tensor

        targets = self._fitting_state(model)
        packed = set(self.compressed)
        modules: dict[str, nn.Module] = {}
        for name in targets:
            stored = self.aliases.get(name, name)
            path, attribute = _split(name)
            owner = model.get_submodule(path)
            if stored in packed:
                modules[stored] = pack_tensor(owner, attribute, self[stored], modules.get(stored))
            else:
                _assign(owner, attribute, self.decode(stored))
        list_own_states(model.modules(), [module for module in model.modules() if asks_for_states(module)])
        return model.eval()

    def summary(self) -> str:
        """Return one line per tensor: name, kind, shape, bits per element, bytes."""
        lines = []
        for name, layout in self._layouts():
            bits = 8 * layout.nbytes / max(1, layout.numel)
            lines.append(f"{name}  {_describe(layout)}  {tuple(layout.shape)}  {bits:.2f} bits  {layout.nbytes} bytes")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Artifact({len(self)} tensors, {len(self.compressed)} compressed, {self.nbytes} bytes)"

    def _layouts(self) -> Iterator[tuple[str, Any]]:
        for name in self._tensors:
            if isinstance(self._tensors, StoredTensors):
                yield name, self._tensors.layout(name)
            else:
                yield name, self._tensors[name].layout

    def _fitting_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's state once it is that of the artifact; batch norms that were folded are taken out."""
        shapes = {name: tuple(layout.shape) for name, layout in self._layouts()}
        folded = FoldedNorms.of(model, shapes)
        self._check_names(folded.states(_state_of(model)))
        folded.apply(model)
        return dict(_state_of(model))

    def _check_names(self, targets: Mapping[str, torch.Tensor]) -> None:
        layouts = dict(self._layouts())
        layouts |= {alias: layouts[name] for alias, name in self.aliases.items()}
        missing, extra = sorted(targets.keys() - layouts.keys()), sorted(layouts.keys() - targets.keys())
        differing = [
            f"{name} {tuple(targets[name].shape)} instead of {tuple(layout.shape)}"
            for name, layout in layouts.items()
            if name in targets and tuple(targets[name].shape) != tuple(layout.shape)
        ]
        if missing or extra or differing:
            raise ArtifactError(
                "The artifact belongs to another model. "
                f"Not in the artifact: {missing[:10]}; not in the model: {extra[:10]}; other shapes: {differing[:10]}."
            )


class _ModelTensors(Mapping[str, CompressedTensor[Any]]):
    """Compresses the weights of a live model when asked for."""

    def __init__(self, sites: Mapping[str, WeightSite]) -> None:
        self._sites = sites

    def __getitem__(self, name: str) -> CompressedTensor[Any]:
        site = self._sites[name]
        if not site.simulators:
            return DenseTensor.from_tensor(site.tensor.detach().clone()).to("cpu")
        return compress_tensor(site.tensor, site.simulators, name).to("cpu")

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)


def make_empty_directory(folder: Path) -> None:
    """Create a folder, or accept one that is empty.

    Raises:
        NotADirectoryError: the path is a file.
        FileExistsError: the folder holds something.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; give a folder that is empty or does not exist.")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a folder that is empty or does not exist.")


def _split(name: str) -> tuple[str, str]:
    path, _, attribute = name.rpartition(".")
    return path, attribute


def _state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        yield from own_state(module, path)


def _assign(owner: nn.Module, attribute: str, value: torch.Tensor) -> None:
    old = getattr(owner, attribute)
    if old.is_meta:
        value = value.clone()
        slot: Any = owner._parameters if isinstance(old, nn.Parameter) else owner._buffers
        slot[attribute] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    else:
        with torch.no_grad():
            old.copy_(value)


def _as_json(value: Any) -> Any:
    """JSON-compatible data from a config or a plan."""
    if value is None:
        return None
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif hasattr(value, "to_dict"):
        value = value.to_dict()
    return json.loads(json.dumps(value, allow_nan=False))


def _describe(layout: Any) -> str:
    kind = layout.dtype if layout.kind == "dense" else getattr(layout, "format", f"{layout.kind}")
    return f"{kind}, sparse" if layout.kept is not None else str(kind)
