"""Build profiles: the sizes and defaults of a bundle, from a TOML file and the command line, fitted to a pair of
models.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path

from builder.spec import DrafterSpec, TargetSpec
from runtime.errors import ProfileError
from runtime.machine import human_bytes
from runtime.manifest import Limits, Memory, Serving

PROFILES = Path(__file__).resolve().parent.parent / "engines" / "profiles"
DEFAULT_PROFILE = "cpu"
PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "ort-cpu": ("f32",),
    "ort-cuda": ("f32", "bf16", "f16"),
    "tensorrt": ("f32", "bf16", "f16"),
    "tensorrt-rtx": ("f32", "bf16", "f16"),
}
"""Precisions that can be built, by back end."""

_BATCH_MAX = 1024
_WINDOW_BOUNDS = "from block size + 2 to the drafter's max_position_embeddings"
_MAX_SEQ_LEN_BOUNDS = "from 2 to the target's max_position_embeddings"
_IN_FILE = "Correct the file, after the example of engines/profiles/cpu.toml"


@dataclass(frozen=True)
class Profile:
    """What to build, before the models are known.

    `batches` are the fixed batches; `slots` the requests that state is kept for (None: the largest batch). `window` and
    `max_seq_len` are fitted to the models with a warning, unless named in `explicit`: then a value that doesn't fit is
    an error. `prefill_chunk` and `max_draft` are upper bounds (`max_draft` None: the drafter's whole block). A draft is
    cut before the first confidence below `confidence_threshold`. `gpu` is the one that engines are built for, of back
    ends that build for one (`builder.gpu`).
    """

    name: str = DEFAULT_PROFILE
    backend: str = "ort-cpu"
    precision: str = "f32"
    gpu: str | None = None
    batches: tuple[int, ...] = (1,)
    slots: int | None = None
    window: int = 2048
    max_seq_len: int = 2048
    prefill_chunk: int = 256
    max_draft: int | None = None
    confidence_threshold: float = 0.0
    explicit: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Bounds:
    low: int
    high: int
    meaning: str


@dataclass(frozen=True)
class Resolution:
    """A profile fitted to a pair of models; `warnings` say what was changed or needs attention."""

    limits: Limits
    serving: Serving
    warnings: tuple[str, ...]


def load_profile(name_or_path: str) -> Profile:
    """The profile of that name in engines/profiles, or in the file of that path (anything with a ``/`` or ending in
    ``.toml``).

    Raises ProfileError naming the file and key.
    """
    path = Path(name_or_path)
    if "/" not in name_or_path and path.suffix != ".toml":
        path = PROFILES / f"{name_or_path}.toml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in PROFILES.glob("*.toml"))) or "none"
            remedy = "Or pass the path of a .toml file"
            raise ProfileError(
                f"--profile {name_or_path}", "no such profile", expected=known, found=name_or_path, remedy=remedy
            )
    try:
        data = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ProfileError(
            path,
            "can't be read",
            expected="a readable file",
            found=error.strerror or error,
            remedy="Check the path and its rights",
        ) from None
    except ValueError as error:
        raise ProfileError(path, "is not valid TOML", expected="TOML in UTF-8", found=error, remedy=_IN_FILE) from None
    return _from_toml(data, path)


def _from_toml(data: Mapping[str, object], path: Path) -> Profile:
    known = {field.name for field in fields(Profile)} - {"name", "explicit"}
    values: dict[str, object] = {"name": path.stem}
    for key, value in data.items():
        if key not in known:
            raise ProfileError(path, "unknown key", expected=", ".join(sorted(known)), found=repr(key), remedy=_IN_FILE)
        values[key] = _typed(key, value, path)
    return Profile(**values)  # type: ignore[arg-type]  # every key and type was checked above


def _typed(key: str, value: object, path: Path) -> object:
    if key in ("backend", "precision", "gpu"):
        expected = "a string"
        if isinstance(value, str):
            return value
    elif key == "batches":
        expected = "a list of integers"
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
    elif key == "confidence_threshold":
        expected = "a number"
        if type(value) in (int, float):
            return float(str(value))
    else:
        expected = "an integer"
        if type(value) is int:
            return value
    raise ProfileError(path, f"key {key!r} is ill-typed", expected=expected, found=repr(value), remedy=_IN_FILE)


def override(profile: Profile, **changes: object) -> Profile:
    """`profile` with the values given on the command line; None leaves a value alone. Those given count as explicit."""
    given = {key: value for key, value in changes.items() if value is not None}
    explicit = profile.explicit | given.keys()
    # A profile's slots belong to its own batches.
    if "batches" in given and "slots" not in given:
        given["slots"] = None
    return replace(profile, explicit=explicit, **given)  # type: ignore[arg-type]


def parse_batches(text: str) -> tuple[int, ...]:
    """``"1,2,4"`` as (1, 2, 4). Raises ProfileError when it isn't a list of integers; their values are checked by
    `check_profile`.
    """
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        remedy = "Separate whole numbers by commas"
        raise ProfileError(
            "--batch", "is no list of batches", expected="numbers such as 1,2,4", found=repr(text), remedy=remedy
        ) from None


def check_profile(profile: Profile) -> None:
    """Whatever can be told before the models are known. Raises ProfileError naming the option, its bounds and what was
    found.
    """
    # Whether there is such a back end at all, `builder.backends.check` says.
    precisions = PRECISIONS.get(profile.backend, (profile.precision,))
    if profile.precision not in precisions:
        raise ProfileError(
            "--precision",
            f"can't be built for {profile.backend}",
            expected=" or ".join(precisions),
            found=repr(profile.precision),
            remedy=f"Pass --precision {precisions[0]}",
        )
    _batches(profile)
    for name, low, meaning in (("window", 1, _WINDOW_BOUNDS), ("max_seq_len", 2, _MAX_SEQ_LEN_BOUNDS)):
        value: int = getattr(profile, name)
        if name in profile.explicit and value < low:
            option = f"--{name.replace('_', '-')}"
            remedy = f"Leave {option} out for the profile's, fitted to the models"
            raise ProfileError(option, "is out of bounds", expected=meaning, found=value, remedy=remedy)
    in_profile = f"Change it in profile {profile.name!r}"  # of what has no option
    for name, count in (("prefill_chunk", profile.prefill_chunk), ("max_draft", profile.max_draft)):
        if count is not None and count < 1:
            raise ProfileError(name, "is out of bounds", expected="1 or more", found=count, remedy=in_profile)
    threshold = profile.confidence_threshold
    if not (isfinite(threshold) and 0 <= threshold <= 1):
        raise ProfileError(
            "confidence_threshold", "is out of bounds", expected="0 to 1", found=threshold, remedy=in_profile
        )


def resolve(profile: Profile, target: TargetSpec, drafter: DrafterSpec) -> Resolution:
    """Fit `profile` to the models. Raises ProfileError naming the option, its bounds and what was found."""
    check_profile(profile)
    warnings: list[str] = []
    batches, slots = _batches(profile)
    block = drafter.block_size
    window = _fit(profile, "window", _Bounds(block + 2, drafter.max_positions, _WINDOW_BOUNDS), warnings)
    bounds = _Bounds(2, target.max_positions, _MAX_SEQ_LEN_BOUNDS)
    max_seq_len = _fit(profile, "max_seq_len", bounds, warnings)
    if max_seq_len + block > drafter.max_positions:
        warnings.append(
            f"--max-seq-len {max_seq_len} + block size {block} exceeds the {drafter.max_positions} positions "
            "the drafter was trained for: beyond them drafts are accepted less often (the output stays the same)"
        )
    max_draft = block if profile.max_draft is None else min(profile.max_draft, block)
    limits = Limits(batches, slots, window, max_seq_len, block, min(profile.prefill_chunk, window, max_seq_len))
    return Resolution(limits, Serving(max_draft, profile.confidence_threshold), tuple(warnings))


def _batches(profile: Profile) -> tuple[tuple[int, ...], int]:
    batches = profile.batches
    found = ",".join(map(str, batches)) or "none"
    if not batches or min(batches) < 1 or max(batches) > _BATCH_MAX:
        expected = f"batches from 1 to {_BATCH_MAX}"
        remedy = "Leave --batch out for the profile's"
        raise ProfileError("--batch", "is out of bounds", expected=expected, found=found, remedy=remedy)
    if list(batches) != sorted(set(batches)):
        expected = ",".join(map(str, sorted(set(batches))))
        raise ProfileError(
            "--batch",
            "must be ascending without repeats",
            expected=expected,
            found=found,
            remedy=f"Pass --batch {expected}",
        )
    slots = batches[-1] if profile.slots is None else profile.slots
    if slots < batches[-1]:
        raise ProfileError(
            "slots",
            "is less than the largest batch",
            expected=f"{batches[-1]} or more",
            found=slots,
            remedy=f"Change it in profile {profile.name!r}, or leave it out for the largest batch",
        )
    return batches, slots


def _fit(profile: Profile, name: str, bounds: _Bounds, warnings: list[str]) -> int:
    """A size within `bounds`: an explicit one must lie there, a profile's default is clamped with a warning."""
    value: int = getattr(profile, name)
    option = f"--{name.replace('_', '-')}"
    if bounds.low > bounds.high:
        raise ProfileError(
            option,
            "has no value that fits these models",
            expected=bounds.meaning,
            found=f"{bounds.low} to {bounds.high}",
            remedy="Check max_position_embeddings in the models' config.json",
        )
    if bounds.low <= value <= bounds.high:
        return value
    if name in profile.explicit:
        raise ProfileError(
            option,
            "is out of bounds",
            expected=f"{bounds.low} to {bounds.high} ({bounds.meaning})",
            found=value,
            remedy=f"Leave {option} out for the profile's, fitted to the models",
        )
    clamped = min(max(value, bounds.low), bounds.high)
    warnings.append(f"{option} {value} of profile {profile.name!r} became {clamped}: it goes {bounds.meaning}")
    return clamped


def check_memory(memory: Memory, limits: Limits, available: int | None) -> None:
    """Raise ProfileError when serving would need more than `available` bytes (None: unknown, unchecked)."""
    if available is None or memory.total <= available:
        return
    slots = f"{limits.slots + 1} slots of {human_bytes(memory.per_slot)}"
    raise ProfileError(
        "memory",
        "the bundle would need more than is free on this machine",
        expected=f"{human_bytes(memory.total)} (weights {human_bytes(memory.weights)}, {slots})",
        found=human_bytes(available),
        remedy="Choose a smaller --batch, --max-seq-len or --window",
    )
