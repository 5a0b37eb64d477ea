"""The tokenizer of a Hugging Face directory: ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``."""

from __future__ import annotations

from pathlib import Path

from builder.checkpoints.config import Config, read_json, read_text
from builder.checkpoints.tokenizer_check import check_tokenizer, parse_tokenizer
from builder.spec import TokenizerData


def load_tokenizer(
    directory: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> tuple[TokenizerData | None, list[Path]]:
    """The tokenizer and the files it was read from; None without a ``tokenizer.json`` (the target is served with ids).

    Args:
        eos_token_ids: what the model's configs name; when empty, the tokenizer's own eos token is looked up.

    Raises:
        CheckpointError: a file that isn't what it should be, or ids outside the model's vocabulary.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return None, []
    files = [path]
    text = read_text(path)
    tokenizer = parse_tokenizer(path, text)
    bos = eos = template = None
    if (directory / "tokenizer_config.json").exists():
        config = read_json(directory / "tokenizer_config.json")
        files.append(config.path)
        bos, eos = _token(config, "bos_token"), _token(config, "eos_token")
        template = _template(config)
    if (directory / "chat_template.jinja").exists():
        files.append(directory / "chat_template.jinja")
        template = read_text(files[-1])
    special = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token is not None}
    known = {token: identifier for token, identifier in special.items() if identifier is not None}
    if not eos_token_ids and eos in known:
        eos_token_ids = (known[eos],)
    data = TokenizerData(text, template, bos, eos, eos_token_ids)
    check_tokenizer(path, data, vocab_size=vocab_size, known=known, lossless=False)
    return data, files


def _token(config: Config, key: str) -> str | None:
    """A special token's text, given plainly or as an object with ``content``."""
    if isinstance(config.values.get(key), dict):
        table = config.table(key)
        return None if table is None else table.string("content")
    return config.string(key) if config.has(key) else None


def _template(config: Config) -> str | None:
    """The chat template, or the one named ``default`` out of several."""
    key = "chat_template"
    if not isinstance(config.values.get(key), list):
        return config.string(key) if config.has(key) else None
    named = {}
    for entry in config.sequence(key, dict):
        table = Config(config.path, entry, f"{key}.")
        named[table.string("name")] = table.string("template")
    return named.get("default")
