"""Typed access to the keys of a checkpoint's configuration, with one-line errors.

Used for ``config.json`` and its siblings and for GGUF metadata alike. JSON's types are taken at their word: a boolean
is not an integer, and neither is ``7.0``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from builder.errors import CheckpointError

RESTORE = "Use the file that came with the checkpoint"

_REQUIRED: Any = object()


def show(value: object, limit: int = 60) -> str:
    """`value` as it would stand in JSON, cut to `limit` characters, for error messages."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object that refuses a key given twice: the reader can't know which of the two was meant."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {show(key)} listed twice")
        result[key] = value
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def read_text(path: Path) -> str:
    """The UTF-8 text of a file. Raises CheckpointError when it is missing, unreadable or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(path, "file missing", expected="a readable file", found="none", remedy=RESTORE) from None
    except OSError as error:
        raise CheckpointError(
            path, "cannot be read", expected="a readable file", found=error.strerror or error, remedy="Check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(path, "not text", expected="UTF-8", found=f"byte {error.start}", remedy=RESTORE) from None


def read_json(path: Path) -> Config:
    """Read a JSON object. Raises CheckpointError: file missing, not JSON, a key given twice, or not an object."""
    text = read_text(path)
    try:
        values = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, "not valid JSON", expected="one JSON object", found=error, remedy=RESTORE) from None
    if not isinstance(values, dict):
        raise CheckpointError(path, "wrong JSON type", expected="an object", found=show(values), remedy=RESTORE)
    return Config(path, values)


class Config:
    """The keys of one configuration. ``null`` counts as absent for keys that have a default."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def where(self, key: str) -> str:
        return f"{self.path}: {self.prefix}{key}"

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.values.get(key) is not None

    def fail(self, key: str, problem: str, *, expected: object = None, remedy: str = RESTORE) -> NoReturn:
        """Raise a CheckpointError about `key`, showing what was found there."""
        found = show(self.values[key]) if key in self.values else "no such key"
        raise CheckpointError(self.where(key), problem, expected=expected, found=found, remedy=remedy)

    def _get(self, key: str, default: Any, expected: str) -> Any:
        if not self.has(key):
            if default is _REQUIRED:
                self.fail(key, "missing" if key not in self.values else "null", expected=expected)
            return default
        return self.values[key]

    def integer(
        self, key: str, *, minimum: int = 0, maximum: int | None = None, default: int | None = _REQUIRED
    ) -> int:
        """An integer within ``[minimum, maximum]``."""
        expected = f"an integer ≥ {minimum}" if maximum is None else f"an integer in [{minimum}, {maximum}]"
        value = self._get(key, default, expected)
        if type(value) is not int:
            self.fail(key, "not an integer", expected=expected)
        if value < minimum or (maximum is not None and value > maximum):
            self.fail(key, "out of range", expected=expected)
        return value

    def number(self, key: str, *, default: float = _REQUIRED) -> float:
        """A finite number > 0 (JSON integers included)."""
        value = self._get(key, default, "a number > 0")
        if type(value) not in (int, float):
            self.fail(key, "not a number", expected="a number > 0")
        if not (value > 0 and math.isfinite(value)):
            self.fail(key, "out of range", expected="a number > 0")
        return float(value)

    def boolean(self, key: str, *, default: bool = _REQUIRED) -> bool:
        value = self._get(key, default, "true or false")
        if type(value) is not bool:
            self.fail(key, "not a boolean", expected="true or false")
        return value

    def string(self, key: str, *, default: str = _REQUIRED) -> str:
        value = self._get(key, default, "a string")
        if type(value) is not str:
            self.fail(key, "not a string", expected="a string")
        return value

    def one_of(self, key: str, allowed: Iterable[str], *, default: str = _REQUIRED, problem: str) -> str:
        """A string out of `allowed`; `problem` names the kind of thing that is unknown otherwise."""
        names = sorted(allowed)
        value = self.string(key, default=default)
        if value not in names:
            self.fail(key, problem, expected=" or ".join(names), remedy="This value is not supported here")
        return value

    def sequence(self, key: str, item: type, *, default: list[Any] = _REQUIRED) -> list[Any]:
        """A list whose items are exactly of type `item`."""
        expected = f"a list of {_NAMES.get(item, item.__name__)}"
        value = self._get(key, default, expected)
        if type(value) is not list or any(type(entry) is not item for entry in value):
            self.fail(key, "wrong type", expected=expected)
        return list(value)

    def table(self, key: str) -> Config | None:
        """A nested object, or None when absent or null."""
        value = self._get(key, None, "an object")
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, "wrong type", expected="an object or null")
        return Config(self.path, value, f"{self.prefix}{key}.")


_NAMES = {int: "integers", str: "strings", float: "numbers", bool: "booleans"}
