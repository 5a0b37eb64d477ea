"""The GPU that engines are built for."""

from __future__ import annotations

import pytest

from builder import gpu as module
from builder.gpu import resolve_gpu
from builder.profile import Profile
from runtime.errors import BackendUnavailable, DSparkError, ProfileError
from runtime.nvidia import Gpu


@pytest.mark.parametrize("spelling", ["sm89", "sm_89", "SM89", "89"])
def test_how_it_may_be_spelt(spelling: str) -> None:
    assert resolve_gpu(Profile(backend="tensorrt-rtx", gpu=spelling)) == "sm_89"


@pytest.mark.parametrize(
    ("profile", "error", "message"),
    [
        (Profile(gpu="sm89"), ProfileError, "--gpu: engines of ort-cpu are for no GPU in particular; expected none"),
        (
            Profile(backend="tensorrt-rtx"),
            ProfileError,
            "--gpu: tensorrt-rtx has to be told which GPU will serve; expected sm_75 or sm_80 or sm_86 or sm_89 or "
            "sm_120 or sm_121; found none",
        ),
        (Profile(backend="tensorrt-rtx", gpu="sm90"), ProfileError, "--gpu: tensorrt-rtx can't build for it; expected"),
        (Profile(backend="tensorrt-rtx", gpu="ada"), ProfileError, "--gpu: tensorrt-rtx can't build for it; expected"),
        (
            Profile(backend="tensorrt-rtx", gpu="sm75", precision="bf16"),
            ProfileError,
            "--precision: this GPU has no bfloat16; expected f32 or f16; found bf16 with --gpu sm_75",
        ),
        (
            Profile(backend="tensorrt"),
            BackendUnavailable,
            "--backend tensorrt: builds only on the GPU that will serve; expected sm_75 or",
        ),
    ],
)
def test_what_is_refused(
    profile: Profile, error: type[DSparkError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.machine, "gpus", lambda: ())
    with pytest.raises(error) as caught:
        resolve_gpu(profile)
    assert str(caught.value).startswith(message)


def test_full_tensorrt_takes_the_gpu_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.machine, "gpus", lambda: (Gpu("old", "sm_70", 1), Gpu("Hopper", "sm_90", 1)))
    assert resolve_gpu(Profile(backend="tensorrt")) == "sm_90"
    assert resolve_gpu(Profile(backend="tensorrt", gpu="sm90")) == "sm_90"
    with pytest.raises(ProfileError, match=r"builds only for the GPU of this machine; expected sm_90; found sm_89"):
        resolve_gpu(Profile(backend="tensorrt", gpu="sm_89"))


def test_of_no_gpu_in_particular() -> None:
    assert resolve_gpu(Profile()) is None
    assert resolve_gpu(Profile(backend="ort-cuda")) is None
