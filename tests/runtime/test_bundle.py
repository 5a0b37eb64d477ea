"""Opening a bundle: each kind of damage is one line that names the file, and the machine is checked before use."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import machine
from runtime.bundle import check_machine, hash_file, open_bundle
from runtime.errors import BackendUnavailable, BundleError, MemoryShortage
from runtime.libraries import SUPPORTED, installed, release
from runtime.manifest import Backend, EngineFile, FileEntry, Manifest, Memory, dumps, identity_of

MakeBundle = Callable[..., Path]


def refused(path: Path, *clauses: str, check: str = "full") -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(path, check)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    for clause in clauses:
        assert clause in message
    return message


def test_a_whole_bundle_opens(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bundle()
    monkeypatch.chdir(path.parent)
    bundle = open_bundle("bundle")
    assert bundle.path == path
    assert bundle.path.is_absolute()
    assert sorted(bundle.manifest.files) == ["target.b1.onnx", "tokenizer/tokenizer.json", "weights.bin"]
    assert bundle.manifest.files["weights.bin"].size == 5000
    assert bundle.file("weights.bin") == path / "weights.bin"
    assert bundle.has_tokenizer
    assert open_bundle(path, "quick").manifest == bundle.manifest
    with pytest.raises(BundleError, match="lists no file 'nothing'"):
        bundle.file("nothing")


def test_a_report_beside_the_identity_is_fine(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    (path / "report.json").write_text("{}")
    assert open_bundle(path).path == path


def test_one_byte_changed_in_any_file(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    for name in ("weights.bin", "target.b1.onnx", "tokenizer/tokenizer.json"):
        content = bytearray((path / name).read_bytes())
        content[-1] ^= 1
        (path / name).write_bytes(content)
        refused(path, name, "was altered after the build; expected sha256", "Rebuild the bundle")
        assert open_bundle(path, "quick").path == path  # quick promises sizes only
        content[-1] ^= 1
        (path / name).write_bytes(content)
    assert open_bundle(path).path == path


def test_any_byte_changed_in_the_manifest(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    where = path / "manifest.json"
    good = where.read_bytes()
    for position in range(0, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 1
        where.write_bytes(bad)
        refused(path, "manifest.json", check="quick")


@pytest.mark.parametrize("check", ["full", "quick"])
def test_truncated_longer_missing(make_bundle: MakeBundle, check: str) -> None:
    path = make_bundle()
    os.truncate(path / "weights.bin", 4999)
    refused(path, "weights.bin: is truncated; expected 5000 bytes; found 4999. Rebuild", check=check)
    (path / "weights.bin").write_bytes(b"w" * 5001)
    refused(path, "weights.bin: is longer than when it was built", check=check)
    (path / "weights.bin").unlink()
    refused(path, "has no weights yet; expected weights.bin; found none. Fill it: dspark-build weights", check=check)
    (path / "weights.bin").mkdir()
    refused(path, "weights.bin: is no regular file", check=check)


def test_manifest_truncated_or_binary(make_bundle: MakeBundle) -> None:
    path = make_bundle()
    where = path / "manifest.json"
    text = where.read_text()
    where.write_text(text[: len(text) // 2])
    remedy = ". Remove the directory and build again"
    refused(path, "manifest.json: is not valid JSON", "damaged", remedy)
    where.write_bytes(b"\xff\x00")
    refused(path, "manifest.json: is damaged: no ASCII text at byte 0", remedy)
    where.write_bytes(b"")
    refused(path, "manifest.json: is not valid JSON", remedy)
    where.write_text(text.replace('"format": 3,', '"format": 3, "other": 1,'))
    refused(path, "key 'other' is unknown", remedy)


@pytest.mark.parametrize("function", ["pathlib.Path.read_bytes", "runtime.bundle.hash_file"])
def test_unreadable(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    path = make_bundle()

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(function, refuse)
    refused(path, "can't be read; expected a readable file; found Permission denied. Check the file's rights")


def test_no_bundle(tmp_path: Path) -> None:
    refused(
        tmp_path / "absent",
        "absent: does not exist; expected a bundle; found nothing. Name a directory written by dspark-build",
    )
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is not a bundle; expected a directory; found a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is not a bundle: it has no manifest.json")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/manifest.json").write_text('{"name": "a web page"}')
    refused(tmp_path / "other", "is no bundle manifest: it has no format version")


def test_built_by_another_version(make_bundle: MakeBundle) -> None:
    path = make_bundle(format=4)
    refused(path, "was built by another version; expected format 3; found format 4. Rebuild the bundle")


def test_identity_must_fit(make_bundle: MakeBundle, manifest: Manifest) -> None:
    path = make_bundle()
    opened = open_bundle(path).manifest
    text = dumps(opened).replace('"max_draft": 3', '"max_draft": 2')
    (path / "manifest.json").write_text(text)
    refused(path, "manifest.json: was altered after the build; expected identity")


def rewrite_files(path: Path, files: dict[str, FileEntry]) -> None:
    """Give the bundle a manifest with these files as well and a fitting identity, as an attacker could."""
    manifest = open_bundle(path).manifest
    manifest = replace(manifest, files={**manifest.files, **files})
    manifest = replace(manifest, identity=identity_of(manifest))
    (path / "manifest.json").write_text(dumps(manifest))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "", "a/../../secret", "..\\secret", "manifest.json"])
def test_names_outside_the_bundle(make_bundle: MakeBundle, name: str) -> None:
    path = make_bundle()
    rewrite_files(path, {name: FileEntry(1, "0")})
    refused(path, "is not allowed; expected a path inside the bundle")


def test_links_outside_the_bundle(make_bundle: MakeBundle, tmp_path: Path) -> None:
    path = make_bundle()
    (tmp_path / "secret").write_bytes(b"w" * 5000)
    (path / "weights.bin").unlink()
    (path / "weights.bin").symlink_to(tmp_path / "secret")
    refused(path, "weights.bin: leads outside the bundle")


def test_engine_file_must_be_covered(make_bundle: MakeBundle, manifest: Manifest) -> None:
    engines = (*manifest.engines, EngineFile("draft", 4, "elsewhere.onnx"))
    refused(make_bundle(engines=engines), "key 'files' is wrong", "found no 'elsewhere.onnx'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("limits.batches", batches) for batches in ((), (0, 1), (2, 1), (1, 1))),
        *((f"limits.{name}", 0) for name in ("slots", "window", "max_seq_len", "prefill_chunk", "block_size")),
        ("limits.prefill_chunk", 17),
        ("serving.max_draft", -1),
        ("serving.max_draft", 5),
        ("serving.confidence_threshold", 1.5),
        ("models.vocab_size", 0),
    ],
)
def test_values_must_fit_together(make_bundle: MakeBundle, manifest: Manifest, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    path = make_bundle(**{section: replace(getattr(manifest, section), **{name: value})})
    refused(path, f"manifest.json: key {key!r} is wrong; expected ", "; found ", "Rebuild the bundle", check="quick")


def test_engines_weights_and_state_must_be_there(make_bundle: MakeBundle, manifest: Manifest) -> None:
    expected = "key 'engines' is wrong; expected each graph for each batch; found no seed for batch 2"
    refused(make_bundle("engines", engines=manifest.engines[:-1]), expected)
    refused(make_bundle("weights", files={"target.b1.onnx": b"t"}), "key 'files' is wrong", "found no 'weights.bin'")
    refused(make_bundle("state", state=()), "key 'state' is wrong; expected a tensor or more; found none")


def test_large_files_are_hashed_in_threads(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bundle(files={"weights.bin": os.urandom(3_000_001), "target.b1.onnx": b"t"})
    monkeypatch.setattr("runtime.bundle._THREADED_BYTES", 1 << 20)
    assert open_bundle(path).manifest.files["weights.bin"].sha256 == hash_file(path / "weights.bin")
    with open(path / "weights.bin", "r+b") as file:
        file.seek(2_999_999)
        byte = file.read(1)[0]
        file.seek(2_999_999)
        file.write(bytes([byte ^ 1]))
    refused(path, "weights.bin: was altered")


def test_arguments_of_another_kind(make_bundle: MakeBundle) -> None:
    refused(make_bundle(), "check: is unknown; expected 'full' or 'quick'; found 'none'", check="none")
    for path in (5, None, b"bundle"):
        refused(path, f"path: is no path; expected a str or os.PathLike; found {type(path).__name__}")  # type: ignore[arg-type]


def test_machine_that_fits(make_bundle: MakeBundle) -> None:
    check_machine(open_bundle(make_bundle()))


def test_library_versions_compare_by_number(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(make_bundle(backend=Backend("ort-cpu", "onnxruntime", "1.9.2", "any", "f32")))
    monkeypatch.setattr("runtime.libraries.installed", lambda name: "1.32.0")
    check_machine(bundle)
    monkeypatch.setattr("runtime.libraries.installed", lambda name: "1.9.1")
    with pytest.raises(BackendUnavailable, match="older"):
        check_machine(bundle)


def test_library_missing_or_older(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(make_bundle(backend=Backend("ort-cpu", "onnxruntime", "999.1", "any", "f32")))
    with pytest.raises(BackendUnavailable) as caught:
        check_machine(bundle)
    found = installed("onnxruntime")
    expected = f"expected onnxruntime >= 999.1; found {found}. pip install 'onnxruntime>=999.1'"
    assert str(caught.value).endswith(f"onnxruntime is older than the build's; {expected}")
    monkeypatch.setattr("runtime.libraries.installed", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"needs onnxruntime, which is not installed\. pip install"):
        check_machine(bundle)


def test_back_end_of_another_version(make_bundle: MakeBundle) -> None:
    bundle = open_bundle(make_bundle(backend=Backend("quantum", "quantum", "1", "any", "f32")))
    expected = f"expected one of {', '.join(SUPPORTED)}; found quantum. Rebuild"
    with pytest.raises(BackendUnavailable, match=f"its back end can't run in this version; {expected}"):
        check_machine(bundle)


def test_memory_is_checked_before_allocation(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(make_bundle(memory=Memory(1 << 30, 1 << 30, 0, 4 << 30)))
    check_machine(bundle, available=4 << 30)
    with pytest.raises(MemoryShortage) as caught:
        check_machine(bundle, available=(4 << 30) - 1)
    message = str(caught.value)
    kinds = "weights 1.0 GiB, taps 1.4 KiB, other 3.0 GiB; 2 slots"
    assert f"expected 4.0 GiB ({kinds}); found 4.0 GiB. Rebuild the bundle with" in message
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    check_machine(bundle)
    monkeypatch.setattr(machine, "available_memory", lambda: 5)
    with pytest.raises(BundleError, match="found 5 B"):
        check_machine(bundle)


@pytest.mark.parametrize(
    ("older", "newer"), [("1.9.2", "1.20"), ("1.20", "1.20.1"), ("1.20.0", "1.21.0rc1"), ("0", "0.0.1")]
)
def test_versions_compare_by_number(older: str, newer: str) -> None:
    assert release(older) < release(newer)
    assert release(newer + "+cpu") == release(newer)
    assert release(older + ".0") == release(older)
