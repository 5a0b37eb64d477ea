"""`validate` passes a whole bundle and names the stage at which an altered one first differs."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from runtime import libraries, machine, validate
from runtime.bundle import Bundle, open_bundle
from runtime.console import EXIT_DIFFERS, EXIT_ERROR, EXIT_MACHINE, EXIT_MEMORY, VALIDATE_HELP
from runtime.errors import BackendUnavailable, BundleError, MemoryShortage, ServingError
from runtime.timing import Parting, Timing
from tests.support import TINY_PAIRS, copy_bundle


@pytest.mark.parametrize("pair", ["llama", "qwen3"])
def test_a_whole_bundle_passes(tiny_bundle: Callable[..., Path], pair: str) -> None:
    report = validate.run(tiny_bundle(pair), threads=1, timed=False)
    assert report.passed
    assert (report.timing, report.untimed) == (None, "")
    assert report.lines()[-1] == "validation passed"
    names = [stage.name for stage in report.stages]
    for batch in ("", "batch 2: ", "batch 4: "):
        for part in ("prefill 0", "draft 0 q", "draft 1 ids", "draft 2 confidence", "verify 2"):
            assert f"{batch}{part}" in names
    # Not only within the tolerance: as near as float32 comes.
    assert max(stage.worst for stage in report.stages) < 1e-4


def altered(bundle: Path, to: Path, model: str, tensor: str) -> Path:
    """A copy with one checkpoint tensor changed where it lies in ``weights.bin``, hashes made good."""
    values = load_file(TINY_PAIRS / "llama" / model / "model.safetensors")[tensor]
    data = (bundle / "weights.bin").read_bytes()
    at = data.index(values.tobytes())
    # Not scaled: a norm behind it would take that out again.
    changed = np.ascontiguousarray(np.flip(values)).tobytes()
    return copy_bundle(bundle, to, {"weights.bin": data[:at] + changed + data[at + len(changed) :]})


@pytest.mark.parametrize(
    ("model", "tensor", "first"),
    [
        ("target", "model.layers.1.mlp.down_proj.weight", "prefill 0"),
        ("target", "lm_head.weight", "prefill 0"),
        ("drafter", "fc.weight", "draft 0"),
        ("drafter", "layers.1.self_attn.v_proj.weight", "draft 0"),
        ("drafter", "markov_head.markov_w2.weight", "draft 0"),
        ("drafter", "confidence_head.proj.weight", "draft 0 confidence"),
    ],
)
def test_an_altered_weight_is_found_at_its_stage(
    tiny_bundle: Callable[..., Path], tmp_path: Path, model: str, tensor: str, first: str
) -> None:
    report = validate.run(altered(tiny_bundle(), tmp_path / "bundle", model, tensor), threads=1)
    failed = [stage.name for stage in report.stages if not stage.passed]
    assert failed
    assert failed[0].startswith(first)
    assert report.lines()[-1].startswith(f"validation failed at {failed[0]} ({len(failed)} of {len(report.stages)}")
    # A drafter never shows in what the target computes.
    assert model == "target" or not [name for name in failed if "prefill" in name or "verify" in name]


def test_a_wrong_engine_of_a_larger_batch_is_found(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    """Engines of a batch that reads other weights: a copy of ``weights.bin`` with one changed, under another name."""
    bundle = tiny_bundle()
    wrong = altered(bundle, tmp_path / "wrong", "drafter", "fc.weight")
    engine = (bundle / "draft.b2.onnx").read_bytes().replace(b"weights.bin", b"another.bin")
    files = {"draft.b2.onnx": engine, "another.bin": (wrong / "weights.bin").read_bytes()}
    report = validate.run(copy_bundle(bundle, tmp_path / "bundle", files), threads=1)
    failed = [stage.name for stage in report.stages if not stage.passed]
    assert failed
    assert all(name.startswith("batch 2: draft") for name in failed)


def test_a_wrong_last_row_is_found(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    """Attention of the second row alone takes its keys for values."""
    model = onnx.load(tiny_bundle() / "target.b2.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention" and node.input[3].endswith(".row1"):
            node.input[2] = node.input[1]
    copy = copy_bundle(tiny_bundle(), tmp_path / "bundle", {"target.b2.onnx": model.SerializeToString()})
    report = validate.run(copy, threads=1, timed=False)
    failed = [stage.name for stage in report.stages if not stage.passed]
    assert failed[0] == "batch 2: prefill 0"
    assert all(name.startswith("batch 2: ") for name in failed)


@pytest.mark.parametrize("pair", ["llama", "qwen3"])
def test_draft_engines_take_the_noise(tiny_bundle: Callable[..., Path], tmp_path: Path, pair: str) -> None:
    """Vectors that claim there was none in the round that had some: the ids are others without it."""
    arrays = vectors_of(tiny_bundle(pair))
    assert arrays["1.noise"] > 0
    arrays["1.noise"] = np.zeros_like(arrays["1.noise"])
    copy = copy_bundle(tiny_bundle(pair), tmp_path / "bundle", {validate.VECTORS_NAME: packed(arrays)})
    report = validate.run(copy, threads=1, timed=False)
    failed = {stage.name for stage in report.stages if not stage.passed}
    assert failed >= {f"{batch}draft 1 ids" for batch in ("", "batch 2: ", "batch 4: ")}
    assert not [name for name in failed if "draft 1" not in name]


def vectors_of(bundle: Path) -> dict[str, np.ndarray]:
    with np.load(bundle / validate.VECTORS_NAME) as file:
        return {name: file[name] for name in file.files}


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


@pytest.mark.parametrize("damage", ["cut", "no zip", "empty", "an array missing", "absent"])
def test_damaged_vectors(tiny_bundle: Callable[..., Path], tmp_path: Path, damage: str) -> None:
    bundle = tiny_bundle()
    whole = (bundle / validate.VECTORS_NAME).read_bytes()
    arrays = vectors_of(bundle)
    del arrays["1.logits"]
    content = {"cut": whole[: len(whole) // 2], "no zip": b"vectors", "empty": b"", "an array missing": packed(arrays)}
    copy = copy_bundle(bundle, tmp_path / "bundle", {validate.VECTORS_NAME: content.get(damage)})
    with pytest.raises(BundleError, match=r"vectors\.npz.*Rebuild the bundle") as caught:
        validate.run(copy, threads=1)
    assert "\n" not in str(caught.value)


def test_vectors_of_another_shape_fail(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    arrays = vectors_of(tiny_bundle())
    arrays["0.logits"] = arrays["0.logits"][:, :-1]
    copy = copy_bundle(tiny_bundle(), tmp_path / "bundle", {validate.VECTORS_NAME: packed(arrays)})
    report = validate.run(copy, threads=1, timed=False)
    failed = [stage.name for stage in report.stages if not stage.passed]
    assert failed == [f"{batch}verify 0 (shape)" for batch in ("", "batch 2: ", "batch 4: ")]


def test_nan_fails() -> None:
    assert not validate.Stage("x", float("nan"), 1e-3).passed


def test_a_short_answer_is_timed(tiny_bundle: Callable[..., Path]) -> None:
    report = validate.run(tiny_bundle(), threads=1)
    assert report.passed
    assert report.timing is not None
    assert (report.timing.tokens, report.timing.max_draft, report.timing.parted) == (32, 5, None)
    assert not report.timing.words
    assert report.stages[-1] == validate.Stage("answer with drafts", 0.0, 0.0)
    lines = report.lines()
    assert lines[-2] == f"speed     {report.timing.line()}"
    assert lines[-1] == "validation passed"
    facts = report.facts()
    assert " ".join(facts) == "passed stages timing untimed"
    assert facts["timing"] == report.timing.facts()
    assert facts["untimed"] is None


def test_an_answer_to_a_question_in_words(talking_bundle: Path) -> None:
    report = validate.run(talking_bundle, threads=1)
    assert report.timing is not None
    assert report.timing.words


def test_nothing_is_timed_where_a_stage_differs(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    report = validate.run(altered(tiny_bundle(), tmp_path / "bundle", "target", "lm_head.weight"), threads=1)
    assert (report.timing, report.untimed) == (None, "a stage differs")
    assert report.lines()[-2] == "speed     not timed: a stage differs"


def test_a_prompt_that_fills_the_sequence(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    arrays = vectors_of(tiny_bundle())
    arrays["prompt"] = np.resize(arrays["prompt"], 122)
    copy = copy_bundle(tiny_bundle(), tmp_path / "bundle", {validate.VECTORS_NAME: packed(arrays)})
    report = validate.run(copy, threads=1)
    assert report.passed
    assert report.lines()[-2] == ("speed     not timed: after the prompt there is room for 6 tokens only")
    assert report.facts()["untimed"] == "after the prompt there is room for 6 tokens only"


@pytest.mark.parametrize(
    ("precision", "gap", "passed"), [("f32", 0.5, False), ("f32", 5e-4, True), ("bf16", 0.5, True), ("f16", 9.0, True)]
)
def test_answers_that_part(
    tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, precision: str, gap: float, passed: bool
) -> None:
    """Which fails in float32 alone, and only where the best two logits aren't nearly tied."""
    parted = Timing(True, 32, 3, 5, 2.0, 60.0, 40.0, Parting(20, gap))
    monkeypatch.setattr("runtime.timing.measure", lambda engine, prompt: parted)
    monkeypatch.setattr(validate, "open_bundle", lambda path, check: of_precision(open_bundle(path, check), precision))
    report = validate.run(tiny_bundle(), threads=1)
    assert report.timing == parted
    assert report.passed is passed
    note = f"note      the answer with drafts parts from the plain one at token 20 (best logits {gap:.2g} apart)"
    assert report.lines()[-2] == note
    if passed:
        assert report.stages[-1].name == "batch 4: verify 2"
    else:
        assert report.stages[-1] == validate.Stage("answer with drafts", 12.0, 0.0)
        assert report.lines()[-1].startswith("validation failed at answer with drafts (1 of ")


def of_precision(bundle: Bundle, precision: str) -> Bundle:
    manifest = bundle.manifest
    return replace(bundle, manifest=replace(manifest, backend=replace(manifest.backend, precision=precision)))


def test_the_machine_is_looked_at_before_anything_is_opened(
    tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "open_session", lambda *_: pytest.fail("engines are loaded"))
    monkeypatch.setattr(validate, "_read", lambda *_: pytest.fail("vectors are read"))
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    with pytest.raises(MemoryShortage, match=r"needs more memory than is free.*found 1000 B"):
        validate.run(tiny_bundle(), threads=1)
    monkeypatch.setattr(libraries, "installed", lambda name: None)
    with pytest.raises(BackendUnavailable, match="needs onnxruntime, which is not installed"):
        validate.run(tiny_bundle(), threads=1)


def run_with(report: validate.Report | BaseException) -> Callable[..., validate.Report]:
    def run(path: Path, check: str, *, timed: bool) -> validate.Report:
        if isinstance(report, BaseException):
            raise report
        return report

    return run


@pytest.mark.parametrize("command", ["runtime", "builder"])
@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (validate.Report((validate.Stage("prefill 0", 1e-5, 1e-3),)), 0),
        (validate.Report((validate.Stage("prefill 0", 1e-5, 1e-3),), Timing(True, 32, 3, 5, 1.0, 1.0, 2.0, None)), 0),
        (validate.Report((validate.Stage("prefill 0", 1e-2, 1e-3),)), 3),
        (BundleError("bundle", "is damaged"), 1),
        (ServingError("request", "failed"), 1),
        (MemoryShortage("bundle", "needs more memory than is free"), 4),
        (BackendUnavailable("bundle", "the NVIDIA driver is too old"), 5),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    outcome: validate.Report | BaseException,
    code: int,
) -> None:
    from builder import cli
    from runtime import __main__

    monkeypatch.setattr(validate, "run", run_with(outcome))
    main = {"runtime": __main__.main, "builder": cli.main}[command]
    assert main(["validate", "bundle"]) == code
    captured = capsys.readouterr()
    if isinstance(outcome, BaseException):
        assert (captured.out, captured.err) == ("", f"error: {outcome}\n")
    else:
        assert (captured.out.splitlines(), captured.err) == (outcome.lines(), "")


@pytest.mark.parametrize("command", ["runtime", "builder"])
def test_exit_codes_are_told(capsys: pytest.CaptureFixture[str], command: str) -> None:
    from builder import cli
    from runtime import __main__

    with suppress(SystemExit):
        {"runtime": __main__.main, "builder": cli.main}[command](["validate", "--help"])
    assert VALIDATE_HELP in " ".join(capsys.readouterr().out.split())
    for number in (EXIT_ERROR, EXIT_DIFFERS, EXIT_MEMORY, EXIT_MACHINE):
        assert f"{number} " in VALIDATE_HELP
