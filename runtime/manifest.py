"""The bundle's manifest as frozen dataclasses: what a bundle is, needs and can do.

`manifest.json` is the JSON of `Manifest`, nothing more; every fact has one place here. `dumps` and `loads` are exact
inverses, so a file that differs in any byte from what `dumps` writes was not written by it.
"""

from __future__ import annotations

import hashlib
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import NoReturn, TypeVar

from runtime.errors import BundleError
from runtime.version import DISTRIBUTION

FORMAT_VERSION = 3
MANIFEST_NAME = "manifest.json"
REPORT_NAME = "report.json"
WEIGHTS_NAME = "weights.bin"
TOKENIZER_FILE = "tokenizer/tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer/tokenizer_config.json"
PLUGINS_FILE = "plugins/libdspark_ort.so"
"""The library of kernels for ONNX Runtime, where a bundle brings one."""
KERNELS_FILE = "plugins/libdspark_kernels.so"
"""The kernels alone, for TensorRT's plugins, where a bundle brings them."""
ITEM_BYTES = {"float32": 4, "int64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by the names that states and weights give their types."""
PACKED_NAME = "packed"
"""The directory that a machine keeps its packed weights in."""


def outside_identity(name: str) -> bool:
    """Whether a bundle's identity leaves a file out, by its path relative to the bundle: it differs from build to build
    or from machine to machine."""
    return name == REPORT_NAME or name.partition("/")[0] == PACKED_NAME


_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}
REBUILD = "Rebuild the bundle with dspark-build build --overwrite"
REMOVE = "Remove the directory and build again"
"""Of a damaged manifest: the builder replaces only what it can recognise."""
NOT_A_BUNDLE = "Name a directory written by dspark-build"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Limits:
    """Sizes fixed when the bundle was built.

    `batches` are the fixed batches with engines, ascending. State exists for ``slots`` requests plus one scratch slot
    (index ``slots``). `window` is W, the ring's rows; a sequence holds at most `max_seq_len` tokens (prompt +
    generated); the target's K/V has ``max_seq_len + block_size`` rows a slot. `prefill_chunk` is the most prompt ids a
    prefill call takes (≤ window).
    """

    batches: tuple[int, ...]
    slots: int
    window: int
    max_seq_len: int
    block_size: int
    prefill_chunk: int

    @property
    def tap_rows(self) -> int:
        """Tap rows a slot keeps until its ring takes them in: a prefill chunk, or some undrafted rounds."""
        return max(self.prefill_chunk, self.block_size + 1)


@dataclass(frozen=True)
class Serving:
    """Defaults of the proposal length: at most `max_draft` drafts, cut before the first confidence <
    `confidence_threshold`.
    """

    max_draft: int
    confidence_threshold: float


@dataclass(frozen=True)
class Models:
    """What the runtime must know of the models. `target` and `drafter` are the builder's specs as plain JSON, for
    people.
    """

    vocab_size: int
    tap_width: int
    has_confidence: bool
    eos_token_ids: tuple[int, ...]
    target: Mapping[str, object]
    drafter: Mapping[str, object]


@dataclass(frozen=True)
class Backend:
    """`name` (``ort-cpu`` …), the `library` it needs with the `version` it was built with, `arch` (``any`` on the CPU),
    and the `precision` of the weights."""

    name: str
    library: str
    version: str
    arch: str
    precision: str


@dataclass(frozen=True)
class EngineFile:
    """One compiled graph: `graph` is ``target`` (prefill and verify), ``draft`` or ``seed``; `batch` its fixed rows.
    A TensorRT engine, of one `width` (`runtime.widths`), has a stage of `runtime.engine_records` there; width 0 is
    any."""

    graph: str
    batch: int
    file: str
    width: int = 0


@dataclass(frozen=True)
class StateTensor:
    """A state buffer ``[slots+1, *shape]`` of `dtype`; `kind` is ``cache`` (target K/V), ``ring`` (drafter K/V) or
    ``taps``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str


def state_bytes(tensor: StateTensor, slots: int) -> int:
    """Bytes of a state buffer with so many slots."""
    return slots * math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


@dataclass(frozen=True)
class Memory:
    """Bytes: the weights once loaded (copies that the library packs included), the state of one slot (the ring's part
    apart), and the total that serving takes."""

    weights: int
    per_slot: int
    ring_per_slot: int
    total: int


@dataclass(frozen=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """A checkpoint that went in: its packaging, base name, and the sha256 of each file."""

    packaging: str
    name: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Plugin:
    name: str
    version: str


@dataclass(frozen=True)
class Manifest:
    """`files` covers every file of the identity, by path relative to the bundle (the manifest itself apart); `identity`
    is the sha256 over all other fields. Files outside it (``report.json``) may differ from build to build."""

    format: int
    producer: str
    identity: str
    backend: Backend
    limits: Limits
    serving: Serving
    models: Models
    engines: tuple[EngineFile, ...]
    state: tuple[StateTensor, ...]
    memory: Memory
    plugins: tuple[Plugin, ...]
    conventions: Mapping[str, str]
    target: Source
    drafter: Source
    files: Mapping[str, FileEntry]


def to_plain(value: object) -> object:
    """`value` as plain JSON data: dataclasses and mappings become dicts, tuples and lists become lists.

    Raises TypeError for anything that JSON has no form for.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}")


def from_plain(kind: type[_T], data: object, where: str) -> _T:
    """The dataclass `kind` from plain JSON data, strictly: no key missing, none unknown, every type exact.

    An int stands for a float, but a bool never for a number. Raises BundleError naming the key below `where`
    (``manifest.json: limits.window``).
    """
    return typing.cast(_T, _decode(kind, data, where, ""))


def _decode(kind: object, data: object, where: str, key: str) -> object:
    if kind is object:
        return data
    if isinstance(kind, type) and is_dataclass(kind):
        return _decode_dataclass(kind, data, where, key)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is tuple:
        if not isinstance(data, list):
            _ill_typed(where, key, "a list", data)
        return tuple(_decode(arguments[0], item, where, f"{key}[{i}]") for i, item in enumerate(data))
    if origin is Mapping:
        if not isinstance(data, dict):
            _ill_typed(where, key, "an object", data)
        return {name: _decode(arguments[1], item, where, _join(key, name)) for name, item in data.items()}
    if kind is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        return float(data)
    if kind is int and (not isinstance(data, int) or isinstance(data, bool)):
        _ill_typed(where, key, "an integer", data)
    plain = typing.cast(type, kind)
    if not isinstance(data, plain):
        _ill_typed(where, key, _JSON_NAMES[plain], data)
    return data


def _decode_dataclass(kind: type, data: object, where: str, key: str) -> object:
    if not isinstance(data, dict):
        _ill_typed(where, key, "an object", data)
    hints = typing.get_type_hints(kind)
    for name in hints:
        if name not in data:
            raise BundleError(where, f"key {_join(key, name)!r} is missing", remedy=REMOVE)
    for name in data:
        if name not in hints:
            raise BundleError(where, f"key {_join(key, name)!r} is unknown", remedy=REMOVE)
    return kind(**{name: _decode(hint, data[name], where, _join(key, name)) for name, hint in hints.items()})


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _ill_typed(where: str, key: str, expected: str, data: object) -> NoReturn:
    problem = f"key {key!r} is ill-typed" if key else "is ill-typed"
    raise BundleError(where, problem, expected=expected, found=_JSON_NAMES.get(type(data), "null"), remedy=REMOVE)


def dumps(manifest: Manifest) -> str:
    """The text of ``manifest.json``: keys sorted, two spaces of indentation, ASCII, a newline at the end."""
    return json.dumps(to_plain(manifest), indent=2, sort_keys=True, allow_nan=False) + "\n"


def loads(text: str, where: str = MANIFEST_NAME) -> Manifest:
    """The manifest in `text`, checked strictly.

    Raises BundleError naming `where`: not JSON, another format version, a key missing, unknown or of the wrong type, or
    a text that `dumps` wouldn't have written. The identity is not checked here.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(where, f"is not valid JSON ({error}): the file is damaged", remedy=REMOVE) from None
    if not isinstance(data, dict):
        _ill_typed(where, "", "an object", data)
    version = data.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        raise BundleError(where, "is no bundle manifest: it has no format version", remedy=NOT_A_BUNDLE)
    if version != FORMAT_VERSION:
        raise BundleError(
            where,
            "was built by another version",
            expected=f"format {FORMAT_VERSION}",
            found=f"format {version}",
            remedy=REBUILD if recognised(data) else REMOVE,
        )
    manifest = from_plain(Manifest, data, where)
    if dumps(manifest) != text:
        raise BundleError(where, "was altered after the build", remedy=REMOVE)
    return manifest


def recognised(data: object) -> bool:
    """Whether parsed JSON is a bundle's manifest, of whatever version: then the builder may replace its directory."""
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        return False
    producer = data.get("producer")
    return isinstance(producer, str) and producer.startswith(DISTRIBUTION) and isinstance(data.get("files"), dict)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def identity_of(manifest: Manifest) -> str:
    """The sha256 (hex) over every field but `identity`, as compact JSON with sorted keys."""
    data = to_plain(manifest)
    if isinstance(data, dict):
        del data["identity"]
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()
