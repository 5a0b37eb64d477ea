"""Text in and out: the bundle's tokenizer and chat template, and text that streams in whole characters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import tokenizers

from runtime.errors import BundleError, RequestError
from runtime.manifest import REBUILD, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, object]

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character (yet)."""


class Tokenizer:
    """The tokenizer of a bundle.

    ``tokenizer_config.json`` is written by the builder: `chat_template`, `bos_token` and `eos_token`, strings or null.

    Raises:
        BundleError: a file that is missing or isn't what it should be.
    """

    def __init__(self, bundle: Path) -> None:
        path = bundle / TOKENIZER_FILE
        if not path.is_file():
            raise BundleError(path, "no such file", remedy=REBUILD)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise BundleError(path, "not a tokenizer", found=error, remedy=REBUILD) from error
        # Settings for training batches that some files carry: a prompt is never cut or filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_config(bundle / TOKENIZER_CONFIG_FILE)
        self.chat_template = config.chat_template
        self.bos_token = config.bos_token
        self.eos_token = config.eos_token
        self.special_ids = frozenset(
            token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special
        )

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of raw text, with the special tokens that the tokenizer itself puts around it."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's answer begins. The template writes all special
        tokens.

        Raises:
            RequestError: messages of another shape, no chat template, or a template that refuses them.
        """
        return self._encode(self.render_chat(messages), add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "prompt",
                "not text: a lone surrogate can't be encoded",
                expected="Unicode text",
                found=f"U+{ord(text[error.start]):04X} at character {error.start}",
                remedy='Decode it with errors="replace"',
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Return a conversation as the text that `encode_chat` encodes; the same errors."""
        import jinja2  # 50 ms that raw text and token ids don't need

        check_messages(messages)
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            remedy = "Change the messages, or pass the prompt as text or token ids"
            raise RequestError("messages", "the chat template refuses them", found=error, remedy=remedy) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        """The chat template in the environment that Hugging Face templates are written for (`apply_chat_template`)."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.chat_template is None:
            raise RequestError(
                "messages", "the bundle has no chat template", remedy="Pass the prompt as text or token ids"
            )

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def tojson(value: object, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja's own filter escapes HTML

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        return environment.from_string(self.chat_template)


class Pushed(NamedTuple):
    """What tokens have added to a text: `text` that is certain now; whether a stop string is complete, and how many of
    the tokens were used: all, or up to the one that completed it."""

    text: str
    stopped: bool
    tokens_used: int


class TextStream:
    """Turns the tokens of one sequence into text, piece by piece.

    All pieces together are `Tokenizer.decode` of all tokens, cut before the first stop string. A piece ends with a
    whole character, and before anything that may be the beginning of a stop string.

    Only a window of the last tokens is decoded at each push, never all. It begins some tokens before the new ones,
    because a decoder treats the first token of a sequence in its own way (sentencepiece drops its leading space).
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that are settled already
        self._open = 0  # tokens since the settled text last grew
        self._held = ""  # settled text that may begin a stop string
        self._stopped = False

    def push(self, ids: Sequence[int]) -> Pushed:
        """Add `ids`. After a complete stop string nothing is used any more. Leave out a token id that is itself a stop:
        its text is no part of the output."""
        text = ""
        for used, token in enumerate(ids):
            if self._stopped:
                return Pushed(text, True, used)
            text += self._release(self._settle(token))
        return Pushed(text, self._stopped, len(ids))

    def finish(self) -> str:
        """Return the rest of the text, held back until now; a character that was never completed is a � there."""
        if self._stopped:
            return ""
        rest = self._tokenizer.decode(self._window)[self._shown :] if self._window else ""
        text = self._release(rest) + ("" if self._stopped else self._held)
        self._stopped = True
        return text

    def _settle(self, token: int) -> str:
        """Decode the window with one more token; return the text that no later token can change."""
        if token in self._tokenizer.special_ids:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        end = len(text.rstrip(REPLACEMENT))
        self._open = 0 if end > self._shown else self._open + 1
        if self._open > 8:  # more tokens than a character has bytes: all but the last � are final
            end = max(end, len(text) - 1)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        # Only while nothing but a last � is open: sentencepiece's byte tokens turn from characters back into one � each
        # while the run that they are in is incomplete, and `_shown` then counts neither.
        if len(self._window) > 16 and self._shown >= len(text) - 1:
            self._trim(text)
        return new

    def _trim(self, text: str) -> None:
        """Forget the window's first tokens, where the remaining ones decode to the end of its `text` on their own."""
        open_end = len(text) - self._shown
        for keep in range(4, 9):
            tail = self._tokenizer.decode(self._window[-keep:])
            if len(tail) > open_end and text.endswith(tail):
                del self._window[:-keep]
                self._shown = len(tail) - open_end
                return

    def _release(self, new: str) -> str:
        """Return what can be shown of the held text and `new`; sets `_stopped` at a complete stop string."""
        if not self._stop:
            return new
        text = self._held + new
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self._stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def check_messages(messages: object) -> None:
    """Refuse what isn't a conversation.

    Raises:
        RequestError: not a non-empty list of mappings with the strings `role` and `content`.
    """
    remedy = 'Write each as {"role": "user", "content": "…"}'
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(
            "messages",
            "not a conversation",
            expected="a non-empty list of messages",
            found=repr(messages)[:80],
            remedy=remedy,
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{i}]", "wrong type", expected="a dict", found=type(message).__name__, remedy=remedy
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(
                    f"messages[{i}].{key}",
                    "missing or of another type",
                    expected="a string",
                    found=repr(message.get(key))[:80],
                    remedy=remedy,
                )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` (shorter than `stop`)."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class _Config(NamedTuple):
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None


def _read_config(path: Path) -> _Config:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BundleError(path, "no such file", remedy=REBUILD) from error
    except ValueError as error:
        raise BundleError(path, "not JSON", found=error, remedy=REBUILD) from error
    if not isinstance(raw, dict):
        raise BundleError(path, "wrong type", expected="an object", found=type(raw).__name__, remedy=REBUILD)

    def text(key: str) -> str | None:
        value = raw.get(key)
        if value is not None and not isinstance(value, str):
            raise BundleError(
                f"{path}: {key}", "wrong type", expected="a string or null", found=repr(value)[:80], remedy=REBUILD
            )
        return value

    return _Config(text("chat_template"), text("bos_token"), text("eos_token"))
