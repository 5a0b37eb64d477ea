"""The click group `dspark-build`: options in, calls into builder.build and the runtime's shared commands out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from builder.build import BuildOptions, build
from builder.profile import DEFAULT_PROFILE, load_profile, override, parse_batches
from builder.progress import reporter
from builder.report import BuildReport
from runtime.__main__ import doctor_command, inspect_command, validate_command
from runtime.console import VALIDATE_HELP, terminable
from runtime.libraries import SUPPORTED
from runtime.machine import human_bytes
from runtime.manifest import TOKENIZER_FILE, WEIGHTS_NAME
from runtime.version import DISTRIBUTION, VERSION

_DIRECTORY = click.Path(path_type=Path)
_CHECK = click.Choice(["full", "quick"])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name=DISTRIBUTION)
def group() -> None:
    """Build and examine bundles for DSpark speculative decoding."""


@group.command("build")
@click.option(
    "--target", required=True, type=_DIRECTORY, help="Target checkpoint: a Hugging Face directory or a .gguf file."
)
@click.option("--drafter", required=True, type=_DIRECTORY, help="Drafter checkpoint: a DeepSpec directory.")
@click.option("--out", required=True, type=_DIRECTORY, help="Bundle directory to write.")
@click.option(
    "--profile",
    default=DEFAULT_PROFILE,
    show_default=True,
    metavar="NAME|FILE",
    help="A name in engines/profiles or a .toml file.",
)
@click.option(
    "--batch", metavar="1,2,4", help="Fixed batches to build engines for; the largest is the number of slots."
)
@click.option(
    "--window",
    type=int,
    help="Context rows the drafter sees (W): block size + 2 to its trained positions.  [default: 2048]",
)
@click.option("--max-seq-len", type=int, help="Most tokens of a sequence, prompt included.  [default: 2048]")
@click.option("--precision", help="Precision of weights and state: f32; but on ort-cpu bf16 or f16 too.")
@click.option("--backend", help=f"Back end: {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}.")
@click.option("--gpu", metavar="sm89", help="GPU that tensorrt-rtx engines are built for; this machine needs none.")
@click.option(
    "--plugins",
    type=click.Path(path_type=Path),
    metavar="LIB",
    help="Kernels that the bundle takes along, built from plugins/: libdspark_ort.so on ort-cuda, "
    "libdspark_kernels.so on tensorrt and tensorrt-rtx.",
)
@click.option("--no-weights", is_flag=True, help="Leave weights.bin out: the weights command fills it where it serves.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the bundle at --out, once the new one is complete; one that is up to date stays.",
)
def build_command(
    target: Path,
    drafter: Path,
    out: Path,
    profile: str,
    batch: str | None,
    window: int | None,
    max_seq_len: int | None,
    precision: str | None,
    backend: str | None,
    gpu: str | None,
    plugins: Path | None,
    no_weights: bool,
    overwrite: bool,
) -> None:
    """Build a bundle from a target and its DSpark drafter."""
    chosen = override(
        load_profile(profile),
        batches=None if batch is None else parse_batches(batch),
        window=window,
        max_seq_len=max_seq_len,
        precision=precision,
        backend=backend,
        gpu=gpu,
    )
    with terminable(), reporter() as progress:
        report = build(BuildOptions(target, drafter, out, chosen, overwrite, plugins, no_weights), progress)
    for line in summary(report):
        click.echo(line)


@group.command("weights")
@click.argument("directory", type=_DIRECTORY, metavar="DIR")
@click.option("--target", required=True, type=_DIRECTORY, help="The target checkpoint of the build.")
@click.option("--drafter", required=True, type=_DIRECTORY, help="The drafter checkpoint of the build.")
def weights_command(directory: Path, target: Path, drafter: Path) -> None:
    """Write the weights of a bundle that travelled without them (build --no-weights)."""
    from builder.fill import fill

    with terminable():
        filled = fill(directory, target, drafter)
    verb = "written" if filled.written else "there already"
    click.echo(f"weights   {filled.path}: {human_bytes(filled.size)}, {verb}")


@group.command("inspect")
@click.argument("directory", type=_DIRECTORY, metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--check", type=_CHECK, default="quick", show_default=True, help="Check the files' hashes, or sizes only."
)
@click.option("--layers", is_flag=True, help="Open TensorRT engines and list their layers as built; needs their GPU.")
def inspect_bundle(directory: Path, as_json: bool, check: str, layers: bool) -> None:
    """Tell what a bundle is, needs and can do."""
    inspect_command(directory, check, as_json, layers)


@group.command("validate", epilog=VALIDATE_HELP)
@click.argument("directory", type=_DIRECTORY, metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--check", type=_CHECK, default="full", show_default=True, help="Check the files' hashes, or sizes only.")
@click.option("--no-timing", is_flag=True, help="Replay the vectors only.")
def validate_bundle(directory: Path, as_json: bool, check: str, no_timing: bool) -> int:
    """Replay the vectors stored in a bundle, then time a short answer with and without drafts."""
    return validate_command(directory, check, as_json, not no_timing)


@group.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Tell what this machine can build and run, and what is missing."""
    doctor_command(as_json)


def summary(report: BuildReport) -> list[str]:
    """What to tell after a build: what came out, what it needs, and what to type next."""
    manifest = report.manifest
    limits, memory, backend = manifest.limits, manifest.memory, manifest.backend
    drafts = f"{manifest.serving.max_draft} of {limits.block_size} drafts a round"
    slots = f"{human_bytes(memory.per_slot)} a slot ({limits.slots} + 1 for padding)"
    done = f"built     {report.out} in {report.total_seconds:.1f} s (peak memory {human_bytes(report.peak_memory)})"
    if report.unchanged:
        done = f"unchanged {report.out}: made of the same files, options and versions ({report.total_seconds:.1f} s)"
    return [
        done,
        f"size      {human_bytes(report.bundle_bytes)}, {len(manifest.files)} files, identity {manifest.identity[:16]}",
        f"engines   batches {', '.join(map(str, limits.batches))}; {backend.name}, {backend.precision}",
        f"memory    {human_bytes(memory.total)}: weights {human_bytes(memory.weights)}, {slots}",
        f"ring      window {limits.window}, {human_bytes(memory.ring_per_slot)} a slot",
        f"limits    {limits.max_seq_len} tokens a sequence; at most {drafts}",
        *_next(report),
    ]


def _next(report: BuildReport) -> list[str]:
    """Commands to go on with, as they can be pasted: with this interpreter, from this directory."""
    here = Path.cwd()
    paths = [Path(sys.executable), report.out]
    python, out = (shlex.quote(str(p.relative_to(here) if p.is_relative_to(here) else p)) for p in paths)
    if WEIGHTS_NAME in report.left_out:
        return [f"next      dspark-build weights {out} --target TARGET --drafter DRAFTER, where it will serve"]
    # Chat needs text.
    commands = ["validate", "chat"] if TOKENIZER_FILE in report.manifest.files else ["validate"]
    return [f"{'' if i else 'next':<10}{python} -m runtime {name} {out}" for i, name in enumerate(commands)]
