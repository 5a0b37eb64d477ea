"""Rebuild a Hugging Face tokenizer from GGUF metadata.

Byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``) is rebuilt; its pre-tokenizer isn't stored in the file, only a name
for it, so the names known here are a table and any other is refused: a wrong pre-tokenizer gives wrong ids without a
sign.
SentencePiece models (``llama``) have no tokenizer here and the target is served with token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.checkpoints.config import Config, show
from builder.checkpoints.tokenizer_check import check_tokenizer
from builder.errors import CheckpointError
from builder.spec import TokenizerData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_LEVEL = "gpt2"
WITHOUT_TOKENIZER = ("llama", "none", "no_vocab")
IDS_INSTEAD = "Use the model's Hugging Face checkpoint, or remove the tokenizer keys and serve token ids"

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before BPE.

    Digits are split one by one first when `digits`; then by `regex`, or by GPT-2's own pattern when None. `nfc`
    normalises text before, `ignore_merges` takes a piece that is a token as it is, `add_bos` is the default without
    ``add_bos_token``.
    """

    regex: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt4_like(digits: str) -> str:
    """The pattern of Llama 3 and Qwen, which differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = PreTokenizer(regex=_gpt4_like(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_SINGLE_DIGITS = PreTokenizer(digits=True)

# Names as llama.cpp writes them to tokenizer.ggml.pre; the patterns are those of the models' own tokenizer.json.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(regex=_gpt4_like(r"\p{N}"), nfc=True),
}


def rebuild_tokenizer(config: Config, vocab_size: int, eos_token_ids: tuple[int, ...]) -> TokenizerData | None:
    """The tokenizer of a GGUF's metadata, checked against its own ids; None where it has none that can be rebuilt.

    Raises:
        CheckpointError: an unknown model or pre-tokenizer, metadata missing or contradictory, or a failed check.
    """
    key = "tokenizer.ggml.model"
    model = config.string(key, default="none")
    if model in WITHOUT_TOKENIZER:
        return None
    if model != BYTE_LEVEL:
        config.fail(
            key,
            "unsupported tokenizer model",
            expected=f"{BYTE_LEVEL}, or {' or '.join(WITHOUT_TOKENIZER)} (token ids only)",
            remedy=IDS_INSTEAD,
        )
    pre = PRE_TOKENIZERS[config.one_of("tokenizer.ggml.pre", PRE_TOKENIZERS, problem="unknown pre-tokenizer")]
    tokens = _tokens(config, vocab_size)
    types = _types(config, len(tokens))
    bos = _named(config, tokens, "tokenizer.ggml.bos_token_id")
    eos = _named(config, tokens, "tokenizer.ggml.eos_token_id")
    add_bos = config.boolean("tokenizer.ggml.add_bos_token", default=pre.add_bos and bos is not None)
    if add_bos and bos is None:
        config.fail("tokenizer.ggml.bos_token_id", "missing although add_bos_token is true", expected="a token id")
    try:
        tokenizer = _build(config, pre, tokens, types, bos if add_bos else None)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        config.fail(key, f"can't be rebuilt ({error})", expected="a byte-level BPE", remedy=IDS_INSTEAD)
    template = "tokenizer.chat_template"
    data = TokenizerData(
        tokenizer_json=tokenizer.to_str(),
        chat_template=config.string(template) if config.has(template) else None,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=eos_token_ids,
    )
    known = {token: index for index, token in enumerate(tokens) if types[index] in (UNKNOWN, CONTROL, USER_DEFINED)}
    # Printable ASCII stands for itself in byte-level BPE: a second set of ids that the file itself vouches for.
    known |= {token: index for index, token in enumerate(tokens) if len(token) == 1 and "!" <= token <= "~"}
    check_tokenizer(config.path, data, vocab_size=vocab_size, known=known, lossless=not pre.nfc and _all_bytes(tokens))
    return data


def _tokens(config: Config, vocab_size: int) -> list[str]:
    key = "tokenizer.ggml.tokens"
    tokens = config.sequence(key, str)
    if not 0 < len(tokens) <= vocab_size:
        raise CheckpointError(
            config.where(key),
            "vocabulary of another size than the embeddings",
            expected=f"at most {vocab_size} tokens",
            found=len(tokens),
            remedy=IDS_INSTEAD,
        )
    if len(set(tokens)) != len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise CheckpointError(
            config.where(key),
            "the same text for two tokens",
            expected="unique texts",
            found=show(twice),
            remedy=IDS_INSTEAD,
        )
    return tokens


def _types(config: Config, count: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    types = config.sequence(key, int, default=[NORMAL] * count)
    if len(types) != count or any(not NORMAL <= kind <= BYTE for kind in types):
        raise CheckpointError(
            config.where(key),
            "doesn't fit the tokens",
            expected=f"{count} numbers from 1 to 6",
            found=f"{len(types)} from {min(types, default=0)} to {max(types, default=0)}",
            remedy=IDS_INSTEAD,
        )
    return types


def _named(config: Config, tokens: list[str], key: str) -> str | None:
    return tokens[config.integer(key, maximum=len(tokens) - 1)] if config.has(key) else None


def _all_bytes(tokens: list[str]) -> bool:
    """Whether each of the 256 bytes has a token, without which some texts have no ids."""
    from tokenizers.pre_tokenizers import ByteLevel

    return set(ByteLevel.alphabet()) <= set(tokens)


def _build(config: Config, pre: PreTokenizer, tokens: list[str], types: list[int], bos: str | None) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab = {token: index for index, token in enumerate(tokens)}
    key = "tokenizer.ggml.merges"
    merges: list[tuple[str, str]] = []
    for merge in config.sequence(key, str):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise CheckpointError(
                config.where(key),
                "a merge of unknown tokens",
                expected="two tokens whose joined text is one",
                found=show(merge),
                remedy=IDS_INSTEAD,
            )
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    steps: list[Any] = []
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.regex), behavior="isolated", invert=False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    # Every added token is in the vocabulary already, so it keeps its id.
    for index, token in enumerate(tokens):
        if types[index] in (UNKNOWN, CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif types[index] == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    byte_level: Any = processors.ByteLevel(trim_offsets=True)
    if bos is not None:
        template = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])]
        )
        byte_level = processors.Sequence([byte_level, template])
    tokenizer.post_processor = byte_level
    return tokenizer
