"""Check a tokenizer against ids that are known beforehand, before a bundle is built around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from builder.checkpoints.config import RESTORE, show
from builder.errors import CheckpointError
from builder.spec import TokenizerData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Contractions, digits, runs of spaces and newlines, scripts, emoji, code: what pre-tokenizers treat differently.
SAMPLES = (
    "Hello, world!",
    "I'll say it's 1234567 — don't they've 3.14?",
    "def f(x):\n    return x ** 2  # comment\n\n\n\tend  ",
    "naïve café, Straße, Größe, 東京, мир, 🙂👍🏽",
    "  leading spaces\r\n\r\nand \t tabs ",
)


def parse_tokenizer(where: object, text: str) -> Tokenizer:
    """A Tokenizer from the text of a ``tokenizer.json``. Raises CheckpointError."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            where,
            "not a tokenizer",
            expected="a tokenizers tokenizer.json",
            found=show(str(error), 120),
            remedy=RESTORE,
        ) from None


def check_tokenizer(
    where: Path, data: TokenizerData, *, vocab_size: int, known: Mapping[str, int], lossless: bool
) -> None:
    """Encode known texts and compare ids.

    Args:
        known: texts that must encode to exactly one id (special tokens, single characters), with that id.
        lossless: whether the tokenizer gives every text back unchanged (byte-level BPE without a normaliser does).

    Raises:
        CheckpointError: an id outside the vocabulary, a known text with another id, a text that changes on the way.
    """
    tokenizer = parse_tokenizer(where, data.tokenizer_json)
    remedy = (
        "The tokenizer and the weights don't belong together, or its rebuilding is at fault: serve token ids instead"
    )
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        raise CheckpointError(
            where,
            "tokenizer larger than the model's vocabulary",
            expected=f"ids < {vocab_size}",
            found=highest,
            remedy=remedy,
        )
    for text, identifier in known.items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids != [identifier]:
            raise CheckpointError(
                where, f"{show(text)} gets other ids", expected=[identifier], found=show(ids), remedy=remedy
            )
    for text in SAMPLES if lossless else ():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        back = tokenizer.decode(ids, skip_special_tokens=False)
        if back != text:
            raise CheckpointError(
                where,
                "text changes on the way through the tokenizer",
                expected=show(text),
                found=show(back),
                remedy=remedy,
            )
