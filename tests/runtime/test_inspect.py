"""inspect, and how ``python -m runtime`` ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import machine
from runtime.__main__ import main
from runtime.engine_records import EngineRecord
from runtime.engine_view import EngineView
from runtime.inspect import describe, inspect
from runtime.machine import Gpu
from runtime.manifest import Memory
from tests.examples import tensorrt_example

MakeBundle = Callable[..., Path]
KEYS = (
    "backend check conventions drafter engines eos_token_ids files filled format has_confidence has_tokenizer identity "
    "limits memory memory_available memory_needed memory_on path plugins problem producer runs_here serving size "
    "target vocab_size"
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


def test_engines_of_a_library_that_keeps_no_records(make_bundle: MakeBundle) -> None:
    engines = inspect(make_bundle())["engines"]
    assert isinstance(engines, list)
    assert engines[0] == {
        "graph": "target",
        "batch": 1,
        "width": 0,
        "file": "target.b1.onnx",
        "size": 6,
        "contents": None,
        "view": None,
    }


def test_memory_by_kind(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 10_000)
    path = make_bundle()
    facts = inspect(path)
    assert facts["memory_needed"] == {
        "weights": 5000,
        "cache": 0,
        "ring": 0,
        "taps": 1440,
        "copies": 0,
        "other": 0,
        "engines": 0,
        "total": 6440,
    }
    assert (facts["memory_available"], facts["memory_on"]) == (10_000, "host")
    assert "memory    6.3 KiB of 9.8 KiB free on this machine: weights 4.9 KiB, taps 1.4 KiB" in describe(path)
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert "memory    6.3 KiB of unknown free on this machine: weights 4.9 KiB, taps 1.4 KiB" in describe(path)


def test_what_went_into_tensorrt_engines(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: (Gpu("Ada", "sm_89", 24 << 30, 20 << 30),))
    path = make_bundle(**tensorrt_example())
    facts = inspect(path)
    assert (facts["memory_available"], facts["memory_on"]) == (20 << 30, "gpu")
    engines = facts["engines"]
    assert isinstance(engines, list)
    assert len(engines) == 24
    assert engines[1] == {
        "graph": "verify",
        "batch": 1,
        "width": 4,
        "file": "engines/verify.b1.w4.engine",
        "size": 104,
        "contents": {
            "layers": {"PLUGIN_V3": 3, "CAST": 1, "SHUFFLE": 2},
            "layer_count": 6,
            "plugins": {"Linear": 2, "SlotWrite": 1},
            "weights": 1,
            "weight_bytes": 2304,
            "aliased": ["taps"],
            "copied": [],
            "copied_bytes": 0,
            "captured": True,
        },
        "view": None,
    }
    lines = describe(path)
    assert "back end  tensorrt-rtx, tensorrt-rtx-cu13-bindings 1.7.1.116, for sm_89, bf16" in lines
    table = lines[-25:]
    assert " ".join(table[0].split()) == "engine batch width size weights state layers of them plugins"
    assert [" ".join(line.split()) for line in table[1:3]] == [
        "verify 1 1 101 B 1 of 2.2 KiB 1 in place 6 3 PLUGIN_V3, 2 SHUFFLE, 1 CAST 2 Linear, 1 SlotWrite",
        "verify 1 4 104 B 1 of 2.2 KiB 1 in place 6 3 PLUGIN_V3, 2 SHUFFLE, 1 CAST 2 Linear, 1 SlotWrite",
    ]
    at = table[0].index("of them")
    assert {line[at:].partition(" PLUGIN_V3")[0] for line in table[1:]} == {"3"}


def test_what_engines_without_kernels_copy(make_bundle: MakeBundle) -> None:
    def alter(record: EngineRecord) -> EngineRecord:
        return replace(record, captured=False, layers={f"L{i}": 5 - i for i in range(5)})

    path = make_bundle(**tensorrt_example(kernels=False, alter=alter))
    contents = inspect(path)["engines"][0]["contents"]  # type: ignore[index]
    assert (contents["aliased"], contents["copied"], contents["copied_bytes"]) == ([], ["taps"], 1440)
    line = " ".join(describe(path)[-24].split())
    assert line == "verify 1 1 101 B 1 of 2.2 KiB 1 copied, 1.4 KiB a call 15, not captured 5 L0, 4 L1, 3 L2 none"


def test_layers_as_built(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    views = {"engines/seed.b1.w5.engine": EngineView(("norm", {"Name": "product", "TacticName": "t"}), 2048)}
    monkeypatch.setattr("runtime.inspect.view_engines", lambda bundle: views)
    path = make_bundle(**tensorrt_example())
    assert describe(path, layers=True)[-3:] == [
        "engines/seed.b1.w5.engine: 2 layers as built, 2.0 KiB while it runs",
        "  norm",
        "  product",
    ]
    assert main(["inspect", str(path), "--layers", "--json"]) == 0
    engines = json.loads(capsys.readouterr().out)["engines"]
    assert [engine["view"] for engine in engines if engine["view"]] == [
        {"layers": ["norm", {"Name": "product", "TacticName": "t"}], "activation_bytes": 2048}
    ]


def test_layers_that_no_one_can_tell(make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(make_bundle()), "--layers"]) == 1
    expected = "expected a bundle for tensorrt or tensorrt-rtx; found ort-cpu. Leave --layers out\n"
    assert capsys.readouterr().err.endswith(expected)


def test_validate_tells_by_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from runtime import validate
    from runtime.validate import Report, Stage

    asked = []

    def run(path: Path, check: str, *, timed: bool) -> Report:
        asked.append((path.name, check, timed))
        return Report((Stage("prefill 0", 1e-5, 1e-3), Stage("verify 0", float(path.name), 1e-3)))

    monkeypatch.setattr(validate, "run", run)
    assert main(["validate", "0.0001"]) == 0
    assert capsys.readouterr().out.endswith("validation passed\n")
    assert main(["validate", "0.5", "--check", "quick", "--json", "--no-timing"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert [stage["passed"] for stage in report["stages"]] == [True, False]
    assert report["stages"][1] == {"name": "verify 0", "worst": 0.5, "allowed": 1e-3, "passed": False}
    assert asked == [("0.0001", "full", True), ("0.5", "quick", False)]
    for number in ("nan", "inf"):
        assert main(["validate", number, "--json"]) == 3
        report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert report["stages"][1] == {"name": "verify 0", "worst": None, "allowed": 1e-3, "passed": False}
