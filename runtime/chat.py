"""``python -m runtime chat DIR``: a conversation in the terminal.

Answers stream to stdout, each followed by a line of statistics. With prompts from a file or pipe, one a line, stdout
holds the answers alone and everything else goes to stderr.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from argparse import Namespace
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import NamedTuple

from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.request import Request
from runtime.result import Result
from runtime.sampling import SamplingParams
from runtime.text import Tokenizer

PROMPT = ">>> "
COMMANDS = {
    "/reset": "forget the conversation",
    "/stats": "figures of all answers so far",
    "/exit": "leave (or Ctrl-D)",
}


def main(options: Namespace) -> int:
    """Talk until the input ends or ``/exit``. `options` are those of `runtime.__main__`.

    Raises:
        RequestError: an option out of its range, a bundle without tokenizer or chat template, or, unless at a terminal,
            a prompt that can't be served.
        BundleError, BackendUnavailable: the bundle can't be served here.
    """
    settings = Request(
        prompt_ids=(0,),  # stands for each turn's own
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingParams(options.temperature, options.top_p, options.seed, options.top_k, options.min_p),
        speculate=options.speculate,
        max_draft=options.max_draft,
    )
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a byte that is no text must not end the conversation
    with Engine(options.bundle, check=options.check) as engine:
        conversation = Conversation(engine, settings, options.system)
        return _Terminal(conversation, interactive=sys.stdin.isatty()).run()


class Conversation:
    """Messages so far, and how the next answer is made of them.

    Raises:
        RequestError: settings that the engine can't serve, or a bundle without tokenizer or chat template.
    """

    def __init__(self, engine: Engine, settings: Request, system: str | None = None) -> None:
        self.engine = engine
        self.results: list[Result] = []
        self._limits = engine.bundle.manifest.limits
        settings.check(self._limits, engine.bundle.manifest.models.vocab_size)
        self._settings = settings
        self._tokenizer = _chat_tokenizer(engine)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []  # user and assistant by turns, a question's answer always with it

    @property
    def turns(self) -> int:
        """Questions with their answers that the next prompt begins with."""
        return len(self._turns) // 2

    def reset(self) -> None:
        """Forget all turns; the system message and the statistics stay."""
        self._turns.clear()

    def prepare(self, question: str) -> Turn:
        """The prompt of the next turn; the oldest turns go where it would leave the answer no room.

        Raises:
            RequestError: the question alone is longer than the engine serves, or the template refuses it.
        """
        # Room for the answer asked for, but never at the cost of more than a quarter of the engine.
        room = min(self._settings.max_new_tokens, self._limits.max_seq_len // 4)
        asked = {"role": "user", "content": question}
        for dropped in range(self.turns + 1):
            messages = [*self._system, *self._turns[2 * dropped :], asked]
            ids = self._tokenizer.encode_chat(messages)
            if len(ids) + room <= self._limits.max_seq_len:
                break
        request = replace(self._settings, prompt_ids=tuple(ids), draw_stream=len(self.results))
        request.check(self._limits, self.engine.bundle.manifest.models.vocab_size)
        return Turn(question, request, dropped)

    def answer(self, turn: Turn) -> Generator[str]:
        """Yield the answer's text as it comes, and remember it. Closing the iterator cancels what is left of it."""
        handle = self.engine.submit(turn.request)
        try:
            for piece in self.engine.stream(handle):
                yield piece.text
        finally:
            self.engine.cancel(handle)  # does nothing to one that is finished
            result = self.engine.result(handle)
            self.results.append(result)
            del self._turns[: 2 * turn.dropped]
            if result.token_ids:  # an answer cancelled before its first token is as good as not asked for
                self._turns += [
                    {"role": "user", "content": turn.question},
                    {"role": "assistant", "content": result.text},
                ]


@dataclass(frozen=True)
class Turn:
    """A question, the request that asks it, and the number of old turns that had to go."""

    question: str
    request: Request
    dropped: int


class _Terminal:
    """Reads prompts and commands, writes answers. `interactive` says that a person types."""

    def __init__(self, conversation: Conversation, interactive: bool) -> None:
        self._conversation = conversation
        self._interactive = interactive
        self._aside = sys.stdout if interactive else sys.stderr

    def run(self) -> int:
        if self._interactive:
            manifest = self._conversation.engine.bundle.manifest
            self._note(f"{manifest.target.name} with {manifest.drafter.name}. {_help()}; Ctrl-C stops an answer.")
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives input() editing and history
        for line in self._lines():
            text = line.strip()
            if text == "/exit":
                break
            if text == "/reset":
                self._conversation.reset()
                self._note("The conversation is forgotten.")
            elif text == "/stats":
                self._note("\n".join(describe_all(self._conversation)))
            elif text.startswith("/") and text[1:].isalpha():
                self._note(f"No such command. {_help()}.")
            elif text:
                self._turn(text)
        return 0

    def _lines(self) -> Iterator[str]:
        if not self._interactive:
            yield from sys.stdin
            return
        while True:
            try:
                yield input(PROMPT)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                self._note("Ctrl-D or /exit leaves.")

    def _turn(self, question: str) -> None:
        try:
            turn = self._conversation.prepare(question)
        except RequestError as error:
            if not self._interactive:
                raise
            self._note(f"error: {error}")
            return
        if turn.dropped:
            left = self._conversation.engine.bundle.manifest.limits.max_seq_len
            self._note(f"(forgot the oldest {_count(turn.dropped, 'turn')}: {left} tokens is all this bundle holds)")
        with _Interrupts() as interrupts:
            pieces = self._conversation.answer(turn)
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
                if interrupts.seen:
                    break
            pieces.close()
        print()
        self._note(describe(self._conversation.results[-1]))

    def _note(self, text: str) -> None:
        print(text, file=self._aside, flush=True)


class _Interrupts:
    """Within it Ctrl-C is only noted, so that an answer ends between two steps of the engine, never inside one. A
    second one leaves the program as usual.
    """

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True


class _Sums(NamedTuple):
    rounds: int
    emitted: int
    proposed: int
    accepted: int


def describe(result: Result) -> str:
    """The line below an answer."""
    sums = _sums([result])
    parts = [_count(len(result.token_ids), "token")]
    if sums.rounds:
        parts += [f"{result.tokens_per_second:.1f} tokens/s", f"{result.stats.tokens_per_round:.2f} tokens a round"]
    parts += _acceptance(sums)
    ending = {"length": "; cut at the limit", "cancelled": "; stopped"}.get(result.finish_reason, "")
    return f"[{', '.join(parts)}{ending}]"


def describe_all(conversation: Conversation) -> list[str]:
    """The lines of ``/stats``."""
    results = conversation.results
    sums = _sums(results)
    tokens = sum(len(result.token_ids) for result in results)
    seconds = {
        stage: sum(getattr(result.stats.seconds, stage) for result in results)
        for stage in ("prefill", "draft", "verify", "host")
    }
    spent = sum(seconds.values()) - seconds["prefill"]
    parts = [_count(len(results), "answer"), _count(tokens, "token")]
    if sums.rounds and spent > 0:
        parts += [f"{sums.emitted / spent:.1f} tokens/s", f"{sums.emitted / sums.rounds:.2f} tokens a round"]
    lines = [", ".join([*parts, *_acceptance(sums)])]
    if sums.proposed:
        longest = max(len(result.stats.acceptance_by_position) for result in results)
        lines.append("accepted by position: " + " ".join(_position(results, j) for j in range(longest)))
    lines.append("seconds: " + ", ".join(f"{stage} {value:.2f}" for stage, value in seconds.items()))
    lines.append(f"remembered: {_count(conversation.turns, 'turn')}")
    return lines


def _sums(results: list[Result]) -> _Sums:
    stats = [result.stats for result in results]
    return _Sums(
        rounds=sum(s.rounds for s in stats),
        emitted=sum(max(len(result.token_ids) - 1, 0) for result in results),
        proposed=sum(sum(s.proposed) for s in stats),
        accepted=sum(sum(s.accepted) for s in stats),
    )


def _acceptance(sums: _Sums) -> list[str]:
    if not sums.proposed:
        return []
    return [f"{sums.accepted} of {sums.proposed} drafts accepted ({sums.accepted / sums.proposed:.0%})"]


def _position(results: list[Result], j: int) -> str:
    """Share of the rounds with a draft `j` that accepted it."""
    proposed = sum(n > j for result in results for n in result.stats.proposed)
    accepted = sum(n > j for result in results for n in result.stats.accepted)
    return f"{accepted / proposed:.0%}"


def _chat_tokenizer(engine: Engine) -> Tokenizer:
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        what = "tokenizer" if tokenizer is None else "chat template"
        remedy = "Use runtime.generate with token ids" if tokenizer is None else "Use runtime.generate with text"
        raise RequestError(engine.bundle.path, f"the bundle has no {what}, which chat needs", remedy=remedy)
    return tokenizer


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _help() -> str:
    return ", ".join(f"{name}: {text}" for name, text in COMMANDS.items())
