"""The GPU that engines are built for: named on the command line, or that of this machine."""

from __future__ import annotations

import re

from builder.errors import BackendUnavailable, ProfileError
from builder.profile import Profile
from runtime import machine
from runtime.libraries import BACKENDS
from runtime.tensorrt_flavours import FLAVOURS

_SPELLING = re.compile(r"(?:sm_?)?(\d{2,3})")
_NO_BFLOAT16 = "sm_75"


def resolve_gpu(profile: Profile) -> str | None:
    """The GPU to build for, as ``sm_89``, or None for a back end whose engines run on any.

    Raises:
        ProfileError: a GPU that the back end can't build for, none where one has to be named, or one that lacks the
            profile's precision.
        BackendUnavailable: a back end that builds only for the GPU of this machine, which has none, or another.
    """
    flavour = FLAVOURS.get(profile.backend)
    if flavour is None:
        if profile.gpu is not None:
            problem = f"engines of {profile.backend} are for no GPU in particular"
            raise ProfileError("--gpu", problem, expected="none", found=profile.gpu, remedy="Leave --gpu out")
        return None
    gpu = _own(profile) if not flavour.architectures else _named(profile, tuple(flavour.architectures))
    if gpu == _NO_BFLOAT16 and profile.precision == "bf16":
        raise ProfileError(
            "--precision",
            "this GPU has no bfloat16",
            expected="f32 or f16",
            found=f"bf16 with --gpu {gpu}",
            remedy="Pass --precision f16",
        )
    return gpu


def _named(profile: Profile, known: tuple[str, ...]) -> str:
    gpu = _spelt(profile.gpu)
    if gpu in known:
        return gpu
    raise ProfileError(
        "--gpu",
        f"{profile.backend} has to be told which GPU will serve"
        if profile.gpu is None
        else f"{profile.backend} can't build for it",
        expected=" or ".join(known),
        found=profile.gpu or "none",
        remedy="doctor tells it on the machine that will serve",
    )


def _own(profile: Profile) -> str:
    """Of the machine: the back end measures there."""
    where, other = (
        f"--backend {profile.backend}",
        "Build on the machine that will serve, or with --backend tensorrt-rtx",
    )
    here = [gpu.architecture for gpu in machine.gpus()]
    known = [gpu for gpu in here if gpu in BACKENDS[profile.backend].architectures]
    if not known:
        raise BackendUnavailable(
            where,
            "builds only on the GPU that will serve",
            expected=" or ".join(BACKENDS[profile.backend].architectures),
            found=", ".join(here) or "no GPU",
            remedy=other,
        )
    if profile.gpu is not None and _spelt(profile.gpu) != known[0]:
        raise ProfileError(
            "--gpu",
            f"{profile.backend} builds only for the GPU of this machine",
            expected=known[0],
            found=profile.gpu,
            remedy=other,
        )
    return known[0]


def _spelt(gpu: str | None) -> str:
    match = _SPELLING.fullmatch((gpu or "").strip().lower())
    return f"sm_{match[1]}" if match else ""
