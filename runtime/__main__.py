"""``python -m runtime chat|validate|inspect|doctor``: needs the runtime's own packages only."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.bundle import Check
from runtime.console import EXIT_DIFFERS, VALIDATE_CODES, VALIDATE_HELP, guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse `arguments` (default: the process's) and run; returns the exit code. Usage errors exit with 2."""
    options = _parser().parse_args(arguments)
    return guarded(lambda: _COMMANDS[options.command](options), extra="")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime", description="Use and examine DSpark bundles.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("chat", "talk with a bundle in the terminal"),
        ("validate", "replay the vectors stored in a bundle, then time a short answer with and without drafts"),
        ("inspect", "what a bundle is, needs and can do"),
    ):
        epilog = VALIDATE_HELP if name == "validate" else None
        command = commands.add_parser(name, help=text, description=text, epilog=epilog)
        command.add_argument("bundle", type=Path, metavar="DIR")
        default = "quick" if name == "inspect" else "full"
        command.add_argument(
            "--check",
            choices=("full", "quick"),
            default=default,
            help=f"files' hashes or sizes only (default {default})",
        )
        if name == "chat":
            _chat_arguments(command)
        else:
            command.add_argument("--json", action="store_true", help="print JSON")
        if name == "validate":
            command.add_argument("--no-timing", dest="timing", action="store_false", help="replay the vectors only")
        if name == "inspect":
            text = "open TensorRT engines and list their layers as built; needs their GPU"
            command.add_argument("--layers", action="store_true", help=text)
    doctor = commands.add_parser("doctor", help="what this machine can build and run")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=512, help="tokens an answer may have (default 512)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this total probability"
    )
    parser.add_argument("--top-k", type=int, default=0, help="sample from so many likeliest tokens (default 0: all)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="leave out tokens less likely than this times the likeliest"
    )
    parser.add_argument("--seed", type=int, default=None, help="makes sampling repeatable")
    parser.add_argument("--max-draft", type=int, default=None, help="drafts a round at most (default: the bundle's)")
    parser.add_argument("--no-speculate", dest="speculate", action="store_false", help="plain decoding")
    parser.add_argument("--system", default=None, help="system message")


def _chat(options: argparse.Namespace) -> int:
    from runtime.chat import main as talk

    return talk(options)


def _validate(options: argparse.Namespace) -> int:
    return validate_command(options.bundle, options.check, options.json, options.timing)


def _inspect(options: argparse.Namespace) -> None:
    inspect_command(options.bundle, options.check, options.json, options.layers)


def _doctor(options: argparse.Namespace) -> None:
    doctor_command(options.json)


def validate_command(path: Path, check: str, as_json: bool, timed: bool) -> int:
    """Print the report of `runtime.validate.run`; returns an exit code of `runtime.console.VALIDATE_HELP`."""

    def run() -> int:
        from runtime import validate

        report = validate.run(path, check=_check(check), timed=timed)
        if as_json:
            _print_json(report.facts())
        else:
            print("\n".join(report.lines()))
        return 0 if report.passed else EXIT_DIFFERS

    return guarded(run, extra="", codes=VALIDATE_CODES)


def inspect_command(path: Path, check: str, as_json: bool, layers: bool) -> None:
    """Print what the bundle at `path` is, with `layers` as TensorRT's engine inspector sees them."""
    from runtime import inspect

    if as_json:
        _print_json(inspect.inspect(path, _check(check), layers))
    else:
        print("\n".join(inspect.describe(path, _check(check), layers)))


def doctor_command(as_json: bool) -> None:
    """Print what this machine can do."""
    from runtime import doctor

    if as_json:
        _print_json(doctor.examine())
    else:
        print("\n".join(doctor.describe()))


def _check(text: str) -> Check:
    return "full" if text == "full" else "quick"


def _print_json(data: object) -> None:
    print(json.dumps(_finite(data), indent=2, sort_keys=True, allow_nan=False))


def _finite(data: object) -> object:
    """`data` with null for the numbers that JSON has no form for: NaN and the infinities."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


_COMMANDS = {"chat": _chat, "validate": _validate, "inspect": _inspect, "doctor": _doctor}

if __name__ == "__main__":
    sys.exit(main())
