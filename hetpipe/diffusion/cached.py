"""A folder of latents: a safetensors file for each sample, in which each tensor has the name of an argument of the transformer,
but for `latents`, what the VAE has made of the picture or video; those of a pair are `image_rotary_emb.0` and `.1`. Whole numbers
that differ from shape to shape (img_shapes, height) are in the file's metadata, as JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hetpipe.files.messages import InputError, counted, cut, nearest, shown
from hetpipe.files.parsing import ParseError, parse_json
from hetpipe.files.tensors import note_slice
from hetpipe.processes.whereabouts import during

LATENTS = "latents"
EMPTY = "empty.safetensors"  # what replaces captions that are dropped
FORMAT = "format"  # a key of metadata that savers write of their own accord


@dataclass(frozen=True)
class Entry:
    """What a file holds: the `kinds` of its tensors by name (type and shape), and `sizes` of its metadata. `digest`: of all that,
    and of a few numbers of each tensor."""

    file: Path
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]
    sizes: Mapping[str, Any]
    digest: str

    @classmethod
    def of(cls, file: Path) -> Entry:
        """Look at a file. InputError where it is none, or its metadata hold something else than whole numbers."""
        try:
            with safe_open(file, framework="pt") as content:
                parts = {name: content.get_slice(name) for name in sorted(content.keys())}
                kinds = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
                said = content.metadata() or {}
                digest = hashlib.sha256(repr(sorted(said.items())).encode())
                for name, part in parts.items():
                    note_slice(digest, name, part)
        except (SafetensorError, OSError) as error:
            raise InputError(cut(f"cannot read {file}: {error}")) from error
        sizes = {key: _numbers(file, key, said[key]) for key in sorted(said) if key != FORMAT}
        return cls(file, kinds, sizes, digest.hexdigest())

    def tensors(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Its tensors, floating-point numbers as float32, in the order of their names."""
        try:
            with safe_open(self.file, framework="pt") as content:
                found = {name: content.get_tensor(name) for name in self.kinds if names is None or name in names}
        except (SafetensorError, OSError) as error:
            raise InputError(cut(f"cannot read {self.file}: {error}")) from error
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


class CachedFolder:
    """The samples of a folder, in the order of their files' names.

    Attributes:
        entries: one a sample; all have the same names and types.
        empty: what replaces captions that are dropped; None where there is no such file.
    """

    def __init__(
        self, entries: Sequence[Entry], arguments: Sequence[str], alone: Collection[str], empty: Entry | None = None
    ) -> None:
        """`arguments`: of the transformer; `alone`: those without samples, which all samples of a group share. InputError where
        these entries do not fit together, or have something that is no argument."""
        self.entries, self.empty = list(entries), empty
        self.alone = frozenset(name for name in self.entries[0].kinds if argument_of(name) in alone)
        self._check(arguments)
        if empty is not None:
            self._check_empty(empty)

    @classmethod
    def read(cls, folder: str | Path, arguments: Sequence[str], alone: Collection[str]) -> CachedFolder:
        """Look at all files of a folder."""
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise InputError(f"there is no folder {shown(str(folder))} with latents (from {Path.cwd()})")
        files = [file for file in sorted(root.rglob("*.safetensors")) if file.name != EMPTY]
        if not files:
            raise InputError(f"{root} holds no .safetensors files: write one for each sample, with its {LATENTS}")
        with during(f"looking at {counted(len(files), 'file')} of latents"):
            entries = [Entry.of(file) for file in files]
        empty = root / EMPTY
        return cls(entries, arguments, alone, Entry.of(empty) if empty.is_file() else None)

    def _check(self, arguments: Sequence[str]) -> None:
        first = self.entries[0]
        if LATENTS not in first.kinds:
            raise InputError(f"{first.file} has no tensor {LATENTS!r}; it has {', '.join(first.kinds) or 'none'}")
        for name in (*first.kinds, *first.sizes):
            if name != LATENTS and argument_of(name) not in arguments:
                raise InputError(
                    f"{first.file} has {name!r}, which is no argument of the transformer{nearest(name, arguments)}: call each "
                    f"tensor as the transformer calls it, and what is learned {LATENTS}"
                )
        for entry in self.entries[1:]:
            for one, other in ((first, entry), (entry, first)):
                if missing := sorted({*one.kinds, *one.sizes} - {*other.kinds, *other.sizes}):
                    raise InputError(f"{one.file} has {missing[0]!r}, and {other.file} has not: all samples need the same")
            for name, (kind, shape) in entry.kinds.items():
                own, like = first.kinds[name]
                if kind != own or len(shape) != len(like):
                    raise InputError(
                        f"{name} is {own} of shape {list(like)} in {first.file}, and {kind} of shape {list(shape)} in "
                        f"{entry.file}"
                    )

    def _check_empty(self, found: Entry) -> None:
        like = self.entries[0]
        for name, kind in found.kinds.items():
            if name == LATENTS or name not in like.kinds:
                raise InputError(
                    f"{found.file} has {name!r}, which is no embedding of a text that the samples have, too: they have "
                    f"{', '.join(like.kinds)}"
                )
            other = next((each for each in self.entries if each.kinds[name] != kind), None)
            if other is not None:
                raise InputError(
                    f"{name} of {found.file} has the shape {list(kind[1])}, and in {other.file} {list(other.kinds[name][1])}: "
                    "pad texts to one length, so that captions can be dropped"
                )

    @cached_property
    def sizes_of_groups(self) -> list[int]:
        """Return, for each sample, the numbers of its tensors; those of other shapes, or other tensors without samples, have
        another number, so that it tells to which group the sample belongs."""
        keys = [(self._weight(entry), self._key(entry)) for entry in self.entries]
        sizes, last = dict[Any, int](), 0
        for key in sorted(set(keys)):
            last = sizes[key] = max(key[0], last + 1)
        return [sizes[key] for key in keys]

    @staticmethod
    def _weight(entry: Entry) -> int:
        return sum(torch.Size(shape).numel() for _, shape in entry.kinds.values())

    def _key(self, entry: Entry) -> str:
        shared = entry.tensors(self.alone) if self.alone else {}
        digests = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in shared.items()}
        return repr((entry.kinds, entry.sizes, digests))


def argument_of(name: str) -> str:
    """The argument of a tensor of this name, which may be one of several."""
    return name.partition(".")[0]


def _numbers(file: Path, key: str, text: str) -> Any:
    """A number of metadata, or lists of them; the innermost as tuples."""
    expected = "expected whole numbers as JSON, such as [[1, 64, 64]]"
    try:
        found = parse_json(text)
    except ParseError as error:
        raise InputError(f"{file}: its metadata {key!r} is {error}, {expected}") from None
    if not all(isinstance(leaf, int) and not isinstance(leaf, bool) and leaf >= 0 for leaf in tree_leaves(found)):
        raise InputError(f"{file}: its metadata {key!r} is {shown(found)}, {expected}")
    return as_tuples(found)


def as_tuples(value: Any) -> Any:
    """Lists of whole numbers as tuples."""
    if not isinstance(value, list):
        return value
    return [as_tuples(each) for each in value] if any(isinstance(each, list) for each in value) else tuple(value)
