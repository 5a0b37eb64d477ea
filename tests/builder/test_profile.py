"""Profiles: read strictly, overridden, and fitted to a pair of models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builder.profile import (
    PROFILES,
    Profile,
    check_memory,
    check_profile,
    load_profile,
    override,
    parse_batches,
    resolve,
)
from builder.spec import DrafterSpec, TargetSpec
from runtime.errors import ProfileError
from runtime.manifest import Limits, Memory
from tests.examples import DRAFTER, TARGET


def refused(profile: Profile, expected: str, target: TargetSpec = TARGET, drafter: DrafterSpec = DRAFTER) -> None:
    with pytest.raises(ProfileError) as caught:
        resolve(profile, target, drafter)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_shipped_profile_is_valid() -> None:
    names = sorted(path.stem for path in PROFILES.glob("*.toml"))
    assert "cpu" in names
    for name in names:
        assert load_profile(name).name == name


def test_the_cpu_profile() -> None:
    profile = load_profile("cpu")
    assert (profile.backend, profile.precision, profile.batches) == ("ort-cpu", "f32", (1,))
    assert (profile.window, profile.max_seq_len, profile.prefill_chunk) == (2048, 2048, 256)
    plan = resolve(profile, TARGET, DRAFTER)
    assert plan.limits == Limits((1,), 1, 2048, 2048, 7, 256)
    assert plan.warnings == ()


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("batches = [1, 4]\nslots = 6\nmax_draft = 5\nconfidence_threshold = 1\n")
    profile = load_profile(str(path))
    assert profile == Profile("mine", batches=(1, 4), slots=6, max_draft=5, confidence_threshold=1.0)
    assert resolve(profile, TARGET, DRAFTER).limits.slots == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("windows = 1", "unknown key; expected backend, batches"),
        ("name = 'x'", "found 'name'. Correct the file"),
        ("explicit = []", "found 'explicit'. Correct the file"),
        ("window = '1'", "key 'window' is ill-typed; expected an integer; found '1'"),
        ("window = true", "key 'window' is ill-typed"),
        ("batches = 1", "key 'batches' is ill-typed; expected a list of integers; found 1"),
        ("batches = [1, '2']", "key 'batches' is ill-typed"),
        ("backend = 1", "key 'backend' is ill-typed; expected a string"),
        ("confidence_threshold = '0'", "key 'confidence_threshold' is ill-typed; expected a number"),
        ("window =", "is not valid TOML"),
        ("\ud800", "is not valid TOML"),
    ],
)
def test_a_wrong_key_in_a_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ProfileError) as caught:
        load_profile(str(path))
    assert expected in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_an_unknown_profile_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"--profile gpu: no such profile; expected .*cpu.*Or pass the path"):
        load_profile("gpu")
    with pytest.raises(
        ProfileError, match=r"can't be read; expected a readable file; found No such file or directory\. Check the path"
    ):
        load_profile(str(tmp_path / "absent.toml"))


def test_override() -> None:
    base = Profile(slots=5)
    assert override(base, window=None, batches=None) == base
    changed = override(base, window=64, batches=(1, 2))
    assert changed.explicit == {"window", "batches"}
    assert (changed.window, changed.batches, changed.slots) == (64, (1, 2), None)


def test_parse_batches() -> None:
    assert parse_batches("1,2, 4") == (1, 2, 4)
    for text in ("", "1,", "a", "1.5", "1;2"):
        with pytest.raises(ProfileError, match="--batch: is no list of batches"):
            parse_batches(text)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ((0,), "--batch: is out of bounds; expected batches from 1 to 1024; found 0"),
        ((), "--batch: is out of bounds; expected batches from 1 to 1024; found none"),
        ((-1, 2), "found -1,2"),
        ((1, 2000), "found 1,2000"),
        ((2, 1), "must be ascending without repeats; expected 1,2; found 2,1"),
        ((1, 1), "must be ascending without repeats; expected 1; found 1,1"),
    ],
)
def test_batches_out_of_bounds(batches: tuple[int, ...], expected: str) -> None:
    refused(Profile(batches=batches), expected)


def test_slots() -> None:
    assert resolve(Profile(batches=(1, 4)), TARGET, DRAFTER).limits.slots == 4
    refused(Profile(batches=(1, 4), slots=3), "slots: is less than the largest batch; expected 4 or more; found 3")


@pytest.mark.parametrize("window", [9, 10, 4095, 4096])
def test_window_within_its_bounds(window: int) -> None:
    plan = resolve(override(Profile(), window=window), TARGET, DRAFTER)
    assert plan.limits.window == window
    assert plan.warnings == ()


@pytest.mark.parametrize("window", [8, 1, 4097])
def test_an_explicit_window_outside_is_an_error(window: int) -> None:
    refused(
        override(Profile(), window=window), "--window: is out of bounds; expected 9 to 4096 (from block size + 2 to"
    )


@pytest.mark.parametrize(("window", "clamped"), [(8, 9), (5000, 4096)])
def test_a_default_window_outside_is_clamped_with_a_warning(window: int, clamped: int) -> None:
    plan = resolve(Profile(window=window), TARGET, DRAFTER)
    assert plan.limits.window == clamped
    assert len(plan.warnings) == 1
    assert f"--window {window} of profile 'cpu' became {clamped}" in plan.warnings[0]


def test_no_window_fits_a_tiny_drafter() -> None:
    refused(Profile(), "--window: has no value that fits these models", drafter=replace(DRAFTER, max_positions=8))


def test_max_seq_len() -> None:
    for length in (2, 4096):
        assert resolve(override(Profile(), max_seq_len=length), TARGET, DRAFTER).limits.max_seq_len == length
    refused(override(Profile(), max_seq_len=4097), "--max-seq-len: is out of bounds; expected 2 to 4096")
    plan = resolve(Profile(), replace(TARGET, max_positions=512), DRAFTER)
    assert plan.limits.max_seq_len == 512
    assert "--max-seq-len 2048 of profile 'cpu' became 512" in plan.warnings[0]


def test_warning_beyond_the_drafters_positions() -> None:
    edge = override(Profile(), max_seq_len=4096 - 7)
    assert resolve(edge, TARGET, DRAFTER).warnings == ()
    (warning,) = resolve(override(Profile(), max_seq_len=4096 - 6), TARGET, DRAFTER).warnings
    assert "--max-seq-len 4090 + block size 7 exceeds the 4096 positions" in warning


def test_bounds_that_follow_the_models() -> None:
    plan = resolve(override(Profile(prefill_chunk=256), window=64), TARGET, DRAFTER)
    assert plan.limits.prefill_chunk == 64
    assert resolve(override(Profile(), max_seq_len=20), TARGET, DRAFTER).limits.prefill_chunk == 20
    assert resolve(Profile(max_draft=None), TARGET, DRAFTER).serving.max_draft == 7
    assert resolve(Profile(max_draft=9), TARGET, DRAFTER).serving.max_draft == 7
    assert resolve(Profile(max_draft=3), TARGET, DRAFTER).serving.max_draft == 3


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (Profile(prefill_chunk=0), "prefill_chunk: is out of bounds; expected 1 or more; found 0"),
        (Profile(max_draft=0), "max_draft: is out of bounds; expected 1 or more; found 0"),
        (Profile(confidence_threshold=1.5), "confidence_threshold: is out of bounds; expected 0 to 1; found 1.5"),
        (Profile(confidence_threshold=float("nan")), "confidence_threshold: is out of bounds"),
        (Profile(precision="f16"), "--precision: can't be built for ort-cpu; expected f32; found 'f16'"),
    ],
)
def test_other_bounds(profile: Profile, expected: str) -> None:
    refused(profile, expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batches": (0,)}, "--batch: is out of bounds; expected batches from 1 to 1024; found 0"),
        ({"batches": (4, 2, 1)}, "--batch: must be ascending without repeats; expected 1,2,4; found 4,2,1"),
        ({"precision": "f16"}, "--precision: can't be built for ort-cpu; expected f32; found 'f16'"),
        ({"window": 0}, "--window: is out of bounds; expected from block size + 2 to the drafter's"),
        ({"window": -1}, "--window: is out of bounds"),
        (
            {"max_seq_len": 1},
            "--max-seq-len: is out of bounds; expected from 2 to the target's max_position_embeddings",
        ),
        ({"max_seq_len": -5}, "--max-seq-len: is out of bounds"),
    ],
)
def test_what_needs_no_models_is_checked_without_them(changes: dict[str, object], expected: str) -> None:
    check_profile(override(Profile(), window=1, max_seq_len=2))
    with pytest.raises(ProfileError) as caught:
        check_profile(override(Profile(), **changes))
    assert expected in str(caught.value)


def test_memory_that_just_fits() -> None:
    limits = Limits((1, 2), 2, window=100, max_seq_len=50, block_size=7, prefill_chunk=10)
    memory = Memory(1000, 200, 50, 1600)
    check_memory(memory, limits, 1600)
    check_memory(memory, limits, None)
    with pytest.raises(ProfileError) as caught:
        check_memory(memory, limits, 1599)
    assert "expected 1.6 KiB (weights 1000 B, 3 slots of 200 B); found 1.6 KiB. Choose a smaller" in str(caught.value)
