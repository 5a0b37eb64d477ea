"""`runtime.chat`: a conversation over a scripted engine, and one over a real tiny bundle."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime import Piece, Request, RequestError, Result, SamplingParams, Stats, chat
from runtime.__main__ import _parser, main
from runtime.manifest import Limits
from runtime.result import Seconds

LIMIT = 40
"""Tokens that the scripted engine holds: a character is a token."""


class Tokenizer:
    """``u:question|a:answer|…``, a token a character."""

    chat_template: str | None = "given"

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [ord(c) for c in "|".join(f"{m['role'][0]}:{m['content']}" for m in messages)]


class Engine:
    """Answers every question with ``pieces``, one token each; Ctrl-C is pressed before the pieces in `interrupt`."""

    pieces: tuple[str, ...] = ("fine", " thanks")
    interrupt: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = Tokenizer()

    def __init__(self, path: Path, check: str) -> None:
        self.bundle = SimpleNamespace(
            path=path,
            manifest=SimpleNamespace(
                limits=Limits((1,), 1, 64, LIMIT, 4, 8),
                models=SimpleNamespace(vocab_size=256),
                target=SimpleNamespace(name="target"),
                drafter=SimpleNamespace(name="drafter"),
            ),
        )
        self.check = check
        self.prompts: list[str] = []
        self.requests: list[Request] = []
        self.cancelled = False
        self.closed = False
        self._given = 0
        self._running = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def submit(self, request: Request) -> int:
        assert not self._running
        self.requests.append(request)
        self.prompts.append("".join(map(chr, request.prompt_ids)))
        self._given, self._running, self.cancelled = 0, True, False
        return len(self.requests)

    def stream(self, handle: int) -> Iterator[Piece]:
        for i, text in enumerate(self.pieces):
            for _ in range(self.interrupt.count(i)):
                signal.raise_signal(signal.SIGINT)
            self._given = i + 1
            yield Piece(text, (i,))
        self._running = False

    def cancel(self, handle: int) -> None:
        self.cancelled, self._running = self._running, False

    def result(self, handle: int) -> Result:
        n = self._given
        stats = Stats(2, [3, 1], [2, 0], 1.5, [0.5, 1.0, 0.0], Seconds(0.5, 0.25, 0.5, 0.25))
        text = "".join(self.pieces[:n])
        return Result(text, tuple(range(n)), "cancelled" if self.cancelled else "stop", stats)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Runs `chat.main` over the lines (at a terminal some may be exceptions); keywords set attributes of the engine."""

    def run(lines: Sequence[object], *arguments: str, terminal: bool = False, **attributes: object) -> Engine:
        kind = type("Scripted", (Engine,), attributes)
        made: list[Engine] = []

        def build(path: Path, check: str) -> Engine:
            made.append(kind(path, check))
            return made[0]

        script = iter(lines)

        def typed(prompt: str) -> object:
            assert prompt == chat.PROMPT
            line = next(script, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        stdin = io.StringIO("" if terminal else "".join(f"{line}\n" for line in lines))
        monkeypatch.setattr(stdin, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr("builtins.input", typed)
        monkeypatch.setattr(chat, "Engine", build)
        assert chat.main(_parser().parse_args(["chat", "bundle", *arguments])) == 0
        assert made[0].closed
        return made[0]

    return run


def test_piped_prompts_give_bare_answers(talk: Callable[..., Engine], capsys: pytest.CaptureFixture[str]) -> None:
    engine = talk(["hi", "", "  now? "])
    out, err = capsys.readouterr()
    assert out == "fine thanks\nfine thanks\n"
    line = "[2 tokens, 1.0 tokens/s, 1.50 tokens a round, 2 of 4 drafts accepted (50%)]"
    assert err == f"{line}\n{line}\n"
    # The second prompt begins with the first turn.
    assert engine.prompts == ["u:hi", "u:hi|a:fine thanks|u:now?"]


def test_options_reach_the_request(talk: Callable[..., Engine]) -> None:
    options = ["--max-new-tokens=7", "--temperature=0.5", "--top-p=0.9", "--seed=3", "--max-draft=2", "--no-speculate"]
    options += ["--top-k=5", "--min-p=0.1"]
    engine = talk(["a", "b"], *options, "--system=be brief", "--check=quick")
    first, second = engine.requests
    assert (first.max_new_tokens, first.max_draft, first.speculate) == (7, 2, False)
    assert first.sampling == SamplingParams(temperature=0.5, top_p=0.9, seed=3, top_k=5, min_p=0.1)
    assert engine.prompts[0] == "s:be brief|u:a"
    assert engine.check == "quick"
    # Turns of one seed draw from different streams.
    assert (first.draw_stream, second.draw_stream) == (0, 1)


def test_the_oldest_turns_are_dropped_with_a_note(
    talk: Callable[..., Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = talk(["one", "two", "six"], "--max-new-tokens=4", "--system=s")
    # 3 + 5 + 1 + 13 + … characters: the third prompt would have 4 + 2 × 20 + 5.
    assert engine.prompts[1:] == ["s:s|u:one|a:fine thanks|u:two", "s:s|u:two|a:fine thanks|u:six"]
    assert "(forgot the oldest 1 turn: 40 tokens is all this bundle holds)" in capsys.readouterr().err


def test_dropped_turns_stay_dropped(talk: Callable[..., Engine]) -> None:
    engine = talk(["x" * 20, "y", "z"], "--max-new-tokens=4")
    assert engine.prompts[1:] == ["u:y", "u:y|a:fine thanks|u:z"]


def test_commands(talk: Callable[..., Engine], capsys: pytest.CaptureFixture[str]) -> None:
    engine = talk(["one", "/stats", "/reset", "/what", "two", "/exit", "three"], terminal=True)
    assert engine.prompts == ["u:one", "u:two"]
    out = capsys.readouterr().out
    assert "1 answer, 2 tokens, 1.0 tokens/s, 0.50 tokens a round, 2 of 4 drafts accepted (50%)" in out
    assert "accepted by position: 50% 100% 0%" in out
    assert "seconds: prefill 0.50, draft 0.25, verify 0.50, host 0.25" in out
    assert "No such command. /reset" in out


def test_stats_before_the_first_answer(talk: Callable[..., Engine], capsys: pytest.CaptureFixture[str]) -> None:
    talk(["/stats"], terminal=True)
    assert "0 answers, 0 tokens\n" in capsys.readouterr().out


def test_a_path_is_a_question(talk: Callable[..., Engine]) -> None:
    assert talk(["/etc/fstab?"]).prompts == ["u:/etc/fstab?"]


def test_ctrl_c_stops_the_answer_only(talk: Callable[..., Engine], capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    engine = talk(["one", "two"], terminal=True, pieces=("fine", " thank", "s"), interrupt=(1,))
    out = capsys.readouterr().out
    assert "fine thank\n[2 tokens, 1.0 tokens/s, 1.50 tokens a round, 2 of 4 drafts accepted (50%); stopped]" in out
    assert engine.prompts == ["u:one", "u:one|a:fine thank|u:two"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves(talk: Callable[..., Engine]) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk(["one"], terminal=True, interrupt=(0, 0))


def test_ctrl_c_and_ctrl_d_at_the_prompt(talk: Callable[..., Engine], capsys: pytest.CaptureFixture[str]) -> None:
    engine = talk([KeyboardInterrupt(), "one", EOFError(), "two"], terminal=True)
    assert engine.prompts == ["u:one"]
    assert "Ctrl-D or /exit leaves." in capsys.readouterr().out


def test_an_answer_without_a_token_is_forgotten(talk: Callable[..., Engine]) -> None:
    assert talk(["one", "two"], pieces=()).prompts == ["u:one", "u:two"]


def test_a_question_that_is_too_long(talk: Callable[..., Engine], capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(["x" * LIMIT, "one"], terminal=True).prompts == ["u:one"]
    assert "error: prompt: longer than the engine serves; expected at most 39 tokens" in capsys.readouterr().out
    with pytest.raises(RequestError, match="longer than the engine serves"):
        talk(["x" * LIMIT, "one"])


@pytest.mark.parametrize(
    ("attributes", "what"),
    [({"tokenizer": None}, "no tokenizer"), ({"tokenizer": SimpleNamespace(chat_template=None)}, "no chat template")],
)
def test_a_bundle_that_has_no_text(talk: Callable[..., Engine], attributes: dict[str, object], what: str) -> None:
    with pytest.raises(RequestError, match=what):
        talk(["one"], **attributes)


@pytest.mark.parametrize(
    "option", ["--temperature=-1", "--top-p=0", "--min-p=2", "--top-k=-1", "--max-new-tokens=-1", "--max-draft=5"]
)
def test_bad_options_are_one_line(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "Engine", Engine)
    assert main(["chat", "bundle", option]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_real_bundle(talking_bundle: Path) -> None:
    """Through the command line: a tiny pair answers two prompts, with speculation as without."""
    command = [sys.executable, "-m", "runtime", "chat", str(talking_bundle), "--max-new-tokens", "6"]

    def answers(*options: str) -> list[str]:
        done = subprocess.run([*command, *options], input="w3 w4\nw5\n", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    spoken = answers()
    assert [len(line.split()) for line in spoken] == [6, 6]
    assert answers("--no-speculate") == spoken


def test_a_real_bundle_without_tokenizer(tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tiny_bundle("llama")
    assert main(["chat", str(bundle)]) == 1
    error = capsys.readouterr().err
    assert error == f"error: {bundle}: the bundle has no tokenizer, which chat needs. " + (
        "Use runtime.generate with token ids\n"
    )
