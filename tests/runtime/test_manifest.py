"""The manifest's text: exact inverse, strict types, one line for each fault."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from runtime.errors import BundleError
from runtime.manifest import FileEntry, Manifest, Serving, dumps, identity_of, loads


def test_loads_is_the_inverse_of_dumps(manifest: Manifest) -> None:
    full = replace(manifest, files={"weights.bin": FileEntry(5, "ab")})
    assert loads(dumps(full)) == full


def test_text_is_canonical(manifest: Manifest) -> None:
    text = dumps(manifest)
    assert text.endswith("}\n")
    assert text.isascii()
    keys = [line.split('"')[1] for line in text.splitlines() if line.startswith('  "')]
    assert keys == sorted(keys)
    assert len(keys) == 15


def test_identity_covers_every_other_field_and_not_itself(manifest: Manifest) -> None:
    identity = identity_of(manifest)
    assert len(identity) == 64
    assert identity_of(replace(manifest, identity="other")) == identity
    assert identity_of(replace(manifest, serving=Serving(3, 0.26))) != identity
    assert identity_of(replace(manifest, files={"a": FileEntry(1, "0")})) != identity


def changed(manifest: Manifest, path: str, value: object) -> str:
    data: Any = json.loads(dumps(manifest))
    at = data
    *parents, last = path.split(".")
    for key in parents:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("limits.window", ..., "key 'limits.window' is missing"),
        ("limits", ..., "key 'limits' is missing"),
        ("limits.window", "16", "key 'limits.window' is ill-typed; expected an integer; found a string"),
        ("limits.window", 16.0, "key 'limits.window' is ill-typed; expected an integer; found a number"),
        ("limits.window", True, "key 'limits.window' is ill-typed; expected an integer; found true or false"),
        ("limits.batches", 1, "key 'limits.batches' is ill-typed; expected a list; found an integer"),
        ("limits.batches", [1, None], "key 'limits.batches[1]' is ill-typed; expected an integer; found null"),
        ("models.has_confidence", 1, "key 'models.has_confidence' is ill-typed; expected true or false; found an int"),
        ("backend", [], "key 'backend' is ill-typed; expected an object; found a list"),
        ("serving.confidence_threshold", "x", "key 'serving.confidence_threshold' is ill-typed; expected a number"),
        ("engines", [{"graph": "draft"}], "key 'engines[0].batch' is missing"),
        ("files", {"a": {"size": "1", "sha256": "0"}}, "key 'files.a.size' is ill-typed"),
        ("extra", 1, "key 'extra' is unknown"),
        ("format", 99, "was built by another version; expected format 3; found format 99. Rebuild"),
        ("format", ..., "has no format version"),
        ("format", True, "has no format version"),
    ],
)
def test_a_wrong_key_is_named(manifest: Manifest, path: str, value: object, expected: str) -> None:
    with pytest.raises(BundleError) as caught:
        loads(changed(manifest, path, value), "here/manifest.json")
    message = str(caught.value)
    assert message.startswith("here/manifest.json: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": NaN}', "[" * 100_000])
def test_no_manifest_at_all(text: str) -> None:
    with pytest.raises(BundleError) as caught:
        loads(text)
    assert "\n" not in str(caught.value)


def test_the_remedy_is_one_that_the_builder_takes(manifest: Manifest) -> None:
    for text, remedy in (
        ("", "Remove the directory and build again"),
        (changed(manifest, "limits", ...), "Remove the directory and build again"),
        (changed(manifest, "format", 4), "Rebuild the bundle with dspark-build build --overwrite"),
        ('{"format": 3}', "Remove the directory and build again"),
    ):
        with pytest.raises(BundleError) as caught:
            loads(text)
        assert caught.value.remedy == remedy


def test_any_other_spelling_of_the_same_facts_was_not_written_by_us(manifest: Manifest) -> None:
    text = dumps(manifest)
    for other in (text + " ", text.replace("  ", "\t"), text.replace('"format": 3,', '"format": 3, "format": 3,')):
        with pytest.raises(BundleError, match="was altered after the build"):
            loads(other)


def test_an_integer_threshold_is_a_number(manifest: Manifest) -> None:
    # 0 for 0.0 has another spelling, so it is refused as altered, not as ill-typed.
    with pytest.raises(BundleError, match="altered"):
        loads(changed(manifest, "serving.confidence_threshold", 0))
