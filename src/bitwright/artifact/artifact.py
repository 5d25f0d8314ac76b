"""The artifact: what compression produced, for no target in particular."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from bitwright._utils.files import new_directory_atomically
from bitwright._utils.kept_layouts import finalized_for, finalized_words
from bitwright._utils.own_states import asks_for_states, list_own_states
from bitwright._utils.packed_weights import PackedWeight

from .activations import QuantizedActivation
from .compress import compress_tensor
from .errors import ArtifactError
from .folded_norms import FoldedNorms
from .from_graph import graph_tensors
from .graph_sites import GraphSimulators, inner_graph_words
from .layouts import TensorLayout
from .manifest import Manifest, StoredActivation, StoredTensor, library_versions, read_manifest, write_manifest
from .overlaps import overlapping_tensors
from .sites import WeightSite, activation_simulators, dense_state, further_names, own_state, weight_sites
from .storage import DEFAULT_SHARD_BYTES, StoredFiles, StoredTensors, TensorWriter, file_sizes, read_activations
from .tensors import CompressedTensor, DenseTensor

__all__ = ["Artifact"]


class Artifact(Mapping[str, CompressedTensor[Any]]):
    """The tensors of a compressed model by name, packed, with the parameters of its activation quantizers.

    A mapping from the names of the float model's parameters and buffers to compressed tensors; what stood under no
    simulator is there uncompressed. Made by :meth:`from_model` or :meth:`load`.

    Attributes:
        activations: activation quantizers by module path.
        aliases: further names of tensors (tied weights), to the name that they are stored under.
        folded_norms: paths of the float model's batch norms that are part of the weights; None if that is not known.
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
        folded_norms: Iterable[str] | None = None,
        config: Any = None,
        plan: Any = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self._tensors = tensors
        self.aliases = dict(aliases or {})
        self.activations = dict(activations or {})
        self.folded_norms = None if folded_norms is None else tuple(folded_norms)
        self.config = config
        self.plan = plan
        self.versions = dict(versions or library_versions())

    @classmethod
    def from_model(cls, model: nn.Module, *, config: Any = None, plan: Any = None, lazy: bool = False) -> Artifact:
        """Pack the weights of a prepared model.

        Args:
            model: a model that a compressor prepared, eager or graph. It is not changed. In a graph, batch norms that
                were folded are part of the weights. Those of an eager model may be packed already, as by
                :meth:`packed_model`; their codes are taken as they are.
            config: the compressor's configuration, kept for the record: an object with ``to_dict`` or ``model_dump``,
                or JSON-compatible data.
            plan: the plan, likewise.
            lazy: compress each tensor when it is asked for, so that a model that is mapped from disk never is in memory
                as a whole; it must then not change before the artifact is saved.

        Raises:
            ArtifactError: a weight cannot be stored so that it decodes to what the model computes, or an activation was
                not calibrated. The message names it. Or the model was finalized for a backend, or is a graph whose
                weights were packed, or a prepared graph stands inside it; or ``config`` or ``plan`` is not
                JSON-compatible.
        """
        described: dict[str, Any] = {"config": _as_json(config, "config"), "plan": _as_json(plan, "plan")}
        target = finalized_for(model)
        if target is not None:
            raise ArtifactError(f"{finalized_words(target)} Make the artifact of the prepared model.")
        _check_unpacked_graphs(model)
        inside = inner_graph_words(model)
        if inside:
            raise ArtifactError(f"{inside} Make the artifact of the graph itself, or prepare the whole model.")
        if isinstance(model, fx.GraphModule) and (GraphSimulators.of(model) or not weight_sites(model)):
            packed, names, ranges, norms = graph_tensors(model)
            return cls(packed, aliases=names, activations=ranges, folded_norms=norms, **described)
        sites = weight_sites(model)
        sources = {site.name: site for site in sites}
        aliases = further_names(model, sites)
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
        return cls(tensors, aliases=aliases, activations=activations, folded_norms=(), **described)

    @classmethod
    def load(cls, directory: str | Path) -> Artifact:
        """Open an artifact on disk; tensors are read when asked for and stay mapped to their file.

        Sizes and hashes of all files are compared with the manifest first. Nothing in them is executed.

        Raises:
            ArtifactError: a file is missing, damaged, of an unknown version, or holds what the manifest does not say.
        """
        folder = Path(directory)
        manifest = read_manifest(folder)
        files = StoredFiles(folder, manifest.files)
        files.check(manifest)
        return cls(
            StoredTensors(files, manifest),
            aliases=manifest.aliases,
            activations=read_activations(files, manifest),
            folded_norms=manifest.folded_norms,
            config=manifest.config,
            plan=manifest.plan,
            versions=manifest.versions,
        )

    def save(self, directory: str | Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        """Write safetensors files and ``manifest.json``, tensor by tensor; an error leaves nothing behind.

        Args:
            directory: a folder that is empty or does not exist.
            shard_bytes: a new file is begun when one holds that much; also what is held in memory at most, plus one
                tensor.

        Raises:
            TypeError: ``shard_bytes`` is no number.
            NotADirectoryError: ``directory`` is a file.
            FileExistsError: it is not empty.
            ArtifactError: a name has no form in UTF-8, an alias is one of no tensor or hides one, or :attr:`config` or
                :attr:`plan` is not JSON-compatible.
        """
        if not isinstance(shard_bytes, Real):
            raise TypeError(f"shard_bytes is a number of bytes, such as 1 << 28, got {shard_bytes!r}.")
        _check_encodable([*self._tensors, *self.aliases, *self.activations])
        self._check_aliases()
        with new_directory_atomically(directory) as folder:
            self._write(folder, shard_bytes)

    def _write(self, folder: Path, shard_bytes: int) -> None:
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
                activations=activations, folded_norms=None if self.folded_norms is None else list(self.folded_norms),
                config=_as_json(self.config, "config"), plan=_as_json(self.plan, "plan"),
            ),
        )  # fmt: skip

    def _check_aliases(self) -> None:
        names = set(self._tensors)
        wrong = [alias for alias, name in self.aliases.items() if name not in names or alias in names]
        if wrong:
            raise ArtifactError(
                f"The aliases {wrong[:10]} are of no tensor of the artifact, or are names of its own tensors, so that "
                "nothing could load it. Let each be a further name of one of the tensors."
            )

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
            model: a model with the parameters and buffers that the artifact names. Changed in place; tensors keep their
                dtype. Those on the meta device are replaced by ones on the CPU; buffers there that no state dict holds
                (``persistent=False``) stay and want values before it runs. Batch norms that graph mode folded into the
                artifact's weights are replaced by ``nn.Identity``.

        Returns:
            ``model``.

        Raises:
            ArtifactError: a tensor of the model is missing in the artifact or the other way round, a shape differs, a
                dtype holds other kinds of numbers (real for complex ones, integers for fractions), elements of a
                tensor share memory, tensors share memory that have different numbers, or a stored tensor cannot be
                read. The model is unchanged then.
        """
        self._check_memory(model)
        self._fitting_state(model)
        fill = _Filler(self)
        for name, owner, attribute in list(_owners_in(model)):
            fill(owner, attribute, name)
        return model

    def packed_model(self, model: nn.Module) -> nn.Module:
        """Give a float model the packed weights, which are decoded on use.

        Args:
            model: as in :meth:`load_into`; may be on the meta device, where buffers that no state dict holds
                (``persistent=False``) stay and want values before it runs. Changed in place: its compressed parameters
                become packed buffers that are decoded to the dtype that the parameter had, the others are copied.

        Returns:
            ``model``, in eval mode.

        Raises:
            ArtifactError: as :meth:`load_into`.
        """
        from .packed import pack_tensor

        targets, fill = self._fitting_state(model), _Filler(self)
        packed, done = set(self.compressed), set()
        modules: dict[tuple[str, torch.dtype], nn.Module] = {}
        for name, target in targets.items():
            stored = self.aliases.get(name, name)
            path, attribute = _split(name)
            owner = model.get_submodule(path)
            if (id(owner), attribute) in done:  # a module at several paths
                continue
            done.add((id(owner), attribute))
            if stored in packed:
                key = stored, target.dtype
                modules[key] = pack_tensor(owner, attribute, self._to_give(stored), modules.get(key), target.dtype)
            else:
                fill(owner, attribute, name)
        if isinstance(self._tensors, StoredTensors):
            self._tensors.give_away()
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

    def _check_memory(self, model: nn.Module) -> None:
        """Refuse tensors of the model, of the artifact's shapes, of which one would overwrite the other."""
        _check_initialized(model)
        layouts, packed = dict(self._layouts()), set(self.compressed)
        stored = {name: layouts.get(self.aliases.get(name, name)) for name, _ in _state_of(model)}
        fitting = ((n, t) for n, t in _state_of(model) if (s := stored[n]) is not None and s.shape == tuple(t.shape))
        wrong = []
        for first, second, same in overlapping_tensors(fitting):
            names = [self.aliases.get(name, name) for name in (first, second)]
            if names[0] == names[1]:
                continue
            if same:
                left, right = map(self.decode, names)
                differ = not torch.allclose(left, right.to(left.dtype), rtol=0, atol=0, equal_nan=True)
            else:
                differ = bool(packed & set(names))
            if differ:
                wrong.append(f"{second} with {first}")
        if wrong:
            raise ArtifactError(
                "Tensors share memory in the model, but have different numbers in the artifact, so that one would "
                f"overwrite the other: {', '.join(wrong[:10])}. Replace each by its clone()."
            )

    def _to_give(self, name: str) -> CompressedTensor[Any]:
        """A tensor for a model, which may be written to: with parts of its own, or mapped to the file."""
        tensor = self[name]
        return tensor if isinstance(self._tensors, StoredTensors) else tensor.copied()

    def _fitting_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's state once it is that of the artifact; batch norms that were folded are taken out.

        Every tensor was read then, so that a damaged one leaves the model as it is.
        """
        _check_initialized(model)
        layouts = dict(self._layouts())
        layouts |= {alias: layouts[name] for alias, name in self.aliases.items()}
        shapes = {name: tuple(layout.shape) for name, layout in layouts.items()}
        folded = FoldedNorms.of(model, shapes, self.folded_norms)
        targets = folded.states(_state_of(model))
        _check_names(layouts, targets, folded.unplaced)
        _check_numbers(layouts, targets)
        if isinstance(self._tensors, StoredTensors):  # the layouts of others are those of tensors that exist
            for name in self._tensors:
                self._tensors[name]
        folded.apply(model)
        return dict(_state_of(model))


def _check_unpacked_graphs(model: nn.Module) -> None:
    """Refuse graphs that call what holds the codes of a weight: the names of the weights are gone."""
    graphs = [module for module in model.modules() if isinstance(module, fx.GraphModule)]
    packed = [name for graph in graphs for name, child in graph._modules.items() if isinstance(child, PackedWeight)]
    if packed:
        raise ArtifactError(
            f"The weights of this graph were packed, and their names are gone: {', '.join(packed[:10])}. Make the "
            "artifact of the prepared graph."
        )


def _check_encodable(names: list[str]) -> None:
    wrong = [name for name in names if name != name.encode(errors="replace").decode()]
    if wrong:
        raise ArtifactError(
            f"Files hold names in UTF-8, which has no lone surrogates: {', '.join(map(repr, wrong[:10]))}. Rename "
            "these modules or tensors of the model."
        )


def _check_initialized(model: nn.Module) -> None:
    empty = [name for name, tensor in _state_of(model) if nn.parameter.is_lazy(tensor)]
    if empty:
        raise ArtifactError(
            f"The model's lazy modules have no parameters yet: {', '.join(map(repr, empty[:10]))}. Call it once with "
            "an input, which makes them, and then give it to the artifact."
        )


def _check_names(layouts: Mapping[str, TensorLayout], targets: Mapping[str, torch.Tensor], unplaced: list[str]) -> None:
    missing, extra = sorted(targets.keys() - layouts.keys()), sorted(layouts.keys() - targets.keys())
    differing = [
        f"{name} {tuple(targets[name].shape)} instead of {tuple(layout.shape)}"
        for name, layout in layouts.items()
        if name in targets and tuple(targets[name].shape) != tuple(layout.shape)
    ]
    if extra and not missing and not differing and set(extra) <= set(unplaced):
        raise ArtifactError(
            "Batch norms were folded into layers of which the model has no parameters to take the result: "
            f"{extra[:10]}. That is so where a forward calls a convolution or linear function without bias, or with a "
            "weight or bias that it uses elsewhere too. Make such a layer an nn.Conv2d, nn.Linear or the like of its "
            "own, quantize in eager mode, which folds nothing, or finalize() and export the prepared graph."
        )
    if missing or extra or differing:
        raise ArtifactError(
            "The artifact belongs to another model. "
            f"Not in the artifact: {missing[:10]}; not in the model: {extra[:10]}; other shapes: {differing[:10]}."
        )


def _check_numbers(layouts: Mapping[str, TensorLayout], targets: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors of the model that cannot take the numbers of the artifact."""
    kinds = [
        f"{name} has {layouts[name].decoded_dtype} in the artifact and {target.dtype} in the model"
        for name, target in targets.items()
        if not torch.can_cast(layouts[name].decoded_dtype, target.dtype)
    ]
    if kinds:
        raise ArtifactError(
            "The model's tensors cannot hold the numbers of the artifact; give it tensors of the artifact's dtype: "
            f"{'; '.join(kinds[:10])}."
        )
    shared = [name for name, target in targets.items() if _repeats_elements(target)]
    if shared:
        raise ArtifactError(
            f"Elements of {shared[:10]} share memory, as expand() leaves them, so that they cannot be written one by "
            "one; replace each by its clone(), in contiguous memory."
        )


def _repeats_elements(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


class _ModelTensors(Mapping[str, CompressedTensor[Any]]):
    """Compresses the weights of a live model when asked for."""

    def __init__(self, sites: Mapping[str, WeightSite]) -> None:
        self._sites = sites

    def __getitem__(self, name: str) -> CompressedTensor[Any]:
        site = self._sites[name]
        if not site.simulators:
            return DenseTensor.from_tensor(site.tensor.detach().clone()).to("cpu")
        return compress_tensor(site.tensor, site.simulators, name).copied()  # some parts are the simulators' own

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)


def _split(name: str) -> tuple[str, str]:
    path, _, attribute = name.rpartition(".")
    return path, attribute


def _owners_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the name, the owner and the local name of every parameter and persistent buffer, aliases included."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, _ in own_state(module, path):
            yield name, module, name.removeprefix(f"{path}.")


def _state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        yield from own_state(module, path)


class _Filler:
    """Gives the dense tensors of a model the numbers of an artifact; tensors that are tied stay one tensor."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._filled: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, owner: nn.Module, attribute: str, name: str) -> None:
        """Write the tensor ``name`` into ``owner.<attribute>``; one on the meta device is replaced."""
        stored = self._artifact.aliases.get(name, name)
        slots: Any = owner._parameters if attribute in owner._parameters else owner._buffers
        old = slots[attribute]
        key = id(old), stored
        if key not in self._filled:
            self._filled[key] = old, _filled(old, self._artifact.decode(stored))  # the old one is kept for its id
        new = self._filled[key][1]
        if new is not old:
            slots[attribute] = new


def _filled(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the numbers of another: itself, or a new one in the place of one on the meta device."""
    if not old.is_meta:
        with torch.no_grad():
            return old.copy_(value)
    value = value.to(old.dtype, copy=True)
    return nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value


def _as_json(value: Any, what: str) -> Any:
    """JSON-compatible data from a config or a plan."""
    if value is None:
        return None
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif hasattr(value, "to_dict"):
        value = value.to_dict()
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{what}= holds what JSON does not ({error}). Give the compressor's object, or data of text, finite "
            "numbers, booleans, None, lists and dictionaries."
        ) from error


def _describe(layout: Any) -> str:
    kind = layout.dtype if layout.kind == "dense" else getattr(layout, "format", f"{layout.kind}")
    return f"{kind}, sparse" if layout.kept is not None else str(kind)
