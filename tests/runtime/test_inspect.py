"""inspect, and how ``python -m runtime`` ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.__main__ import main
from runtime.inspect import describe, inspect
from runtime.manifest import Memory

MakeBundle = Callable[..., Path]
KEYS = (
    "backend check conventions drafter engines eos_token_ids files filled format has_confidence has_tokenizer identity "
    "limits memory memory_available path plugins problem producer runs_here serving size target vocab_size"
)


def test_facts(make_bundle: MakeBundle) -> None:
    facts = inspect(make_bundle())
    assert sorted(facts) == KEYS.split()
    assert facts["size"] == 5000 + 6 + 2
    assert facts["limits"] == {
        "batches": [1, 2],
        "slots": 2,
        "window": 16,
        "max_seq_len": 64,
        "block_size": 4,
        "prefill_chunk": 8,
    }
    assert facts["runs_here"] is True
    assert facts["problem"] is None
    assert facts["has_tokenizer"] is True
    assert inspect(make_bundle("bare", files={"target.b1.onnx": b"x", "weights.bin": b"w"}))["has_tokenizer"] is False


def test_a_bundle_too_big_for_this_machine_is_still_described(make_bundle: MakeBundle) -> None:
    path = make_bundle(memory=Memory(1 << 50, 1, 0, 1 << 50), files={"target.b1.onnx": b"x", "weights.bin": b"w"})
    facts = inspect(path)
    assert facts["runs_here"] is False
    assert "needs more memory than is free" in str(facts["problem"])
    text = "\n".join(describe(path))
    assert "can't run" in text
    assert "token ids (the target has no tokenizer)" in text


def test_text(make_bundle: MakeBundle) -> None:
    text = "\n".join(describe(make_bundle(), "full"))
    for part in (
        "3 files, full check passed",
        "window 16",
        "at most 3 of 4 drafts",
        "below confidence 0.25",
        "tiny-dspark",
    ):
        assert part in text


def test_command_line(make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_bundle()
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 97
    assert main(["inspect", str(path)]) == 0
    assert "at most 3 of 4 drafts" in capsys.readouterr().out


def test_errors_are_one_line(make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_bundle()
    (path / "weights.bin").write_bytes(b"x" * 5000)
    assert main(["inspect", str(path)]) == 0  # quick by default
    capsys.readouterr()
    assert main(["inspect", str(path), "--check", "full"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_debug_shows_the_traceback(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_DEBUG", "1")
    with pytest.raises(ValueError, match="does not exist"):
        main(["inspect", str(make_bundle() / "absent")])


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["inspect", "a", "--check", "maybe"], ["fly"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_validate_tells_by_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from runtime import validate
    from runtime.validate import Report, Stage

    asked = []

    def run(path: Path, check: str) -> Report:
        asked.append((path.name, check))
        return Report((Stage("prefill 0", 1e-5, 1e-3), Stage("verify 0", float(path.name), 1e-3)))

    monkeypatch.setattr(validate, "run", run)
    assert main(["validate", "0.0001"]) == 0
    assert capsys.readouterr().out.endswith("validation passed\n")
    assert main(["validate", "0.5", "--check", "quick", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert [stage["passed"] for stage in report["stages"]] == [True, False]
    assert report["stages"][1] == {"name": "verify 0", "worst": 0.5, "allowed": 1e-3, "passed": False}
    assert asked == [("0.0001", "full"), ("0.5", "quick")]
    for number in ("nan", "inf"):
        assert main(["validate", number, "--json"]) == 1
        report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert report["stages"][1] == {"name": "verify 0", "worst": None, "allowed": 1e-3, "passed": False}
