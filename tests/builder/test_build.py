"""The build from end to end with stand-ins for the stages: order, manifest, report, and what a failure leaves."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest

from builder import build as module
from builder.build import STAGES, BuildOptions, BuildReport, StageEvent, build
from builder.profile import Profile, override
from runtime.bundle import open_bundle
from runtime.errors import BackendUnavailable, BundleError, CheckpointError, ProfileError
from runtime.manifest import Memory
from tests.examples import Stages


class Listener:
    def __init__(self) -> None:
        self.events: list[StageEvent] = []
        self.warnings: list[str] = []

    def stage(self, event: StageEvent) -> None:
        self.events.append(event)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def run(
    out: Path, profile: Profile | None = None, overwrite: bool = False, listener: Listener | None = None
) -> BuildReport:
    profile = profile or override(Profile(max_draft=3), window=32, max_seq_len=64)
    options = BuildOptions(out.parent, out.parent, out, profile, overwrite)
    return build(options, listener or Listener())


def test_stages_in_order(stages: Stages, tmp_path: Path) -> None:
    listener = Listener()
    report = run(tmp_path / "out", listener=listener)
    assert [event.name for event in listener.events] == list(STAGES)
    assert [event.index for event in listener.events] == list(range(len(STAGES)))
    assert all(event.left > 0 for event in listener.events)
    assert list(report.seconds) == list(STAGES)
    assert stages.calls == ["load_target", "load_drafter", "write_weights", "record", "export_graphs", "compile"]


def test_what_comes_out(stages: Stages, tmp_path: Path) -> None:
    report = run(tmp_path / "out")
    manifest = open_bundle(tmp_path / "out").manifest
    assert manifest == report.manifest
    assert sorted(manifest.files) == [
        "target.b1.onnx",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "vectors.npz",
        "weights.bin",
    ]
    assert manifest.backend.precision == "f32"
    assert manifest.models.eos_token_ids == (2, 5)
    assert manifest.models.tap_width == 48
    assert manifest.models.has_confidence is True
    assert manifest.models.drafter["taps"] == [0, 2]
    assert manifest.target.files == {"config.json": "00"}
    assert manifest.drafter.name == "tiny-dspark"
    assert (manifest.serving.max_draft, manifest.serving.confidence_threshold) == (3, 0.0)
    assert report.bundle_bytes == sum(
        path.stat().st_size for path in tmp_path.rglob("out/**/*") if path.is_file()
    ) - sum((tmp_path / "out" / name).stat().st_size for name in ("manifest.json", "report.json"))


def test_memory_by_hand(stages: Stages, tmp_path: Path) -> None:
    cache = 4 * 2 * 2 * (64 + 7) * 8 * 4
    ring = 3 * 2 * 2 * 32 * 16 * 4
    taps = 8 * 2 * 24 * 4
    per_slot = cache + ring + taps
    profile = override(Profile(), window=32, max_seq_len=64, batches=(1, 2))
    manifest = run(tmp_path / "out", profile).manifest
    assert manifest.memory == Memory(100, per_slot, ring, 100 + 3 * per_slot)


def test_memory_is_checked_before_any_write(stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = override(Profile(), window=32, max_seq_len=64, batches=(1, 2))
    state = run(tmp_path / "out", profile).manifest.memory.total - 100
    elements = sum(math.prod(shape) for shape in (*stages.shapes.values(), (24, 48)))
    needed = state + 4 * elements  # the weights once, whatever the batches
    monkeypatch.setattr(module, "available_memory", lambda: needed)
    run(tmp_path / "enough", profile)
    monkeypatch.setattr(module, "available_memory", lambda: needed - 1)
    stages.calls.clear()
    with pytest.raises(
        ProfileError, match=r"memory: the bundle would need more than is free.*Choose a smaller --batch"
    ):
        run(tmp_path / "short", profile)
    assert stages.calls == ["load_target", "load_drafter"]


def test_tokenizer_files(stages: Stages, tmp_path: Path) -> None:
    run(tmp_path / "out")
    folder = tmp_path / "out/tokenizer"
    assert (folder / "tokenizer.json").read_bytes() == '{"model": "é"}\r\n'.encode()
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {
        "chat_template": "{{ messages }}",
        "bos_token": None,
        "eos_token": "</s>",
    }


def test_without_a_tokenizer(stages: Stages, tmp_path: Path) -> None:
    stages.tokenizer = None
    report = run(tmp_path / "out")
    assert not (tmp_path / "out/tokenizer").exists()
    assert report.manifest.models.eos_token_ids == (2,)


def test_two_builds_give_the_same_bytes_but_for_the_report(stages: Stages, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(tmp_path / "a/out")
    run(tmp_path / "b/out")
    names = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(names) == 7
    for name in names:
        if name.name != "report.json":
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_report(stages: Stages, tmp_path: Path) -> None:
    report = run(tmp_path / "out")
    data = json.loads((tmp_path / "out/report.json").read_text())
    assert data["identity"] == report.manifest.identity
    assert data["packages"]["numpy"]
    assert list(data["seconds"]) == sorted(name for name in STAGES if name != "swap in")
    assert data["peak_memory"] > 1 << 20
    assert data["date"].endswith("+00:00")


def test_an_output_that_is_up_to_date_stays(stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = run(out)
    stages.calls.clear()
    written = (out / "manifest.json").stat().st_mtime_ns, (out / "report.json").read_bytes()
    again = run(out, overwrite=True)
    assert (again.unchanged, again.manifest, again.recipe) == (True, first.manifest, first.recipe)
    assert stages.calls == ["load_target", "load_drafter"]
    assert ((out / "manifest.json").stat().st_mtime_ns, (out / "report.json").read_bytes()) == written

    # Whatever decides its bytes makes it anew: sizes, versions, this program, and damage.
    assert not run(out, override(Profile(max_draft=3), window=16, max_seq_len=64), overwrite=True).unchanged
    assert not run(out, overwrite=True).unchanged
    assert run(out, overwrite=True).unchanged
    with monkeypatch.context() as patch:
        patch.setattr("builder.recipe.installed", lambda package: "another version")
        assert not run(out, overwrite=True).unchanged
    with monkeypatch.context() as patch:
        patch.setattr("builder.recipe._code", lambda: "another program")
        assert not run(out, overwrite=True).unchanged
    assert not run(out, overwrite=True).unchanged
    (out / "vectors.npz").write_bytes(b"x")
    assert not run(out, overwrite=True).unchanged
    assert (out / "vectors.npz").read_bytes() == b"v"


def test_warnings_are_told_and_kept(stages: Stages, tmp_path: Path) -> None:
    listener = Listener()
    report = run(tmp_path / "out", override(Profile(), max_seq_len=4096, window=16), listener=listener)
    assert len(listener.warnings) == 1
    assert "exceeds the 4096 positions" in listener.warnings[0]
    assert report.warnings == tuple(listener.warnings)


@pytest.mark.parametrize("stage", ["write_weights", "record", "export_graphs", "compile"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_stage_leaves_the_old_bundle(
    stages: Stages, tmp_path: Path, stage: str, error: BaseException
) -> None:
    before = run(tmp_path / "out").manifest.identity
    stages.fail[stage] = error
    with pytest.raises(type(error)):
        run(tmp_path / "out", override(Profile(), window=16), overwrite=True)
    assert open_bundle(tmp_path / "out").manifest.identity == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_is_written_for_bad_input(stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new/out"
    stages.fail["load_drafter"] = CheckpointError("config.json", "is wrong")
    with pytest.raises(CheckpointError):
        build(BuildOptions(tmp_path, tmp_path, out), Listener())
    del stages.fail["load_drafter"]
    with pytest.raises(ProfileError, match="--window"):
        build(BuildOptions(tmp_path, tmp_path, out, override(Profile(), window=8)), Listener())
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 20)
    with pytest.raises(ProfileError, match="memory: the bundle would need more than is free on this machine"):
        build(BuildOptions(tmp_path, tmp_path, out), Listener())
    assert list(tmp_path.iterdir()) == []


def test_output_is_checked_before_any_work(stages: Stages, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(BundleError, match="is not a bundle"):
        run(out, overwrite=True)
    assert stages.calls == []


def test_disk_space_is_checked_before_any_write(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages.shapes = {"huge": (1 << 40,)}
    monkeypatch.setattr(module, "available_memory", lambda: None)
    out = tmp_path / "new/out"
    with pytest.raises(BundleError, match=r"not enough disk space; expected 4.0 TiB; found .* Free some space"):
        build(BuildOptions(tmp_path, tmp_path, out), Listener())
    assert list(tmp_path.iterdir()) == []


def test_back_end_this_version_lacks(stages: Stages, tmp_path: Path) -> None:
    with pytest.raises(
        BackendUnavailable,
        match=r"--backend quantum: this version can't build for it; expected ort-cpu or ort-cuda or .*; found",
    ):
        run(tmp_path / "out", override(Profile(), backend="quantum"))
