"""The tokenizer files of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from builder.checkpoints import load_target
from tests.builder.checkpoints.helpers import LLAMA, REMOVE, changed, edit_json, refusal, write_target


def tokenizer_json(extra: int = 0) -> str:
    """A character-level tokenizer of 3 special tokens, the lower-case letters and `extra` more."""
    letters = [chr(ord("a") + index) for index in range(26)] + [f"<{index}>" for index in range(extra)]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer.to_str()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = write_target(tmp_path / "target", LLAMA)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_all_files(directory: Path) -> None:
    target = load_target(directory)
    data = target.tokenizer
    assert data is not None
    assert Tokenizer.from_str(data.tokenizer_json).encode("cab</s>").ids == [5, 3, 4, 2]
    assert (data.bos_token, data.eos_token, data.chat_template) == ("<s>", "</s>", "{{ messages }}")
    assert data.eos_token_ids == target.spec.eos_token_ids == (2,)
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(target.source.files)


def test_template_file_wins(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("jinja")
    target = load_target(directory)
    assert target.tokenizer is not None
    assert target.tokenizer.chat_template == "jinja"
    assert "chat_template.jinja" in target.source.files


def test_named_templates(directory: Path) -> None:
    templates = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    edit_json(directory / "tokenizer_config.json", chat_template=templates)
    data = load_target(directory).tokenizer
    assert data is not None
    assert data.chat_template == "d"


def test_eos_from_the_tokenizer_alone(directory: Path) -> None:
    edit_json(directory / "config.json", eos_token_id=REMOVE)
    target = load_target(directory)
    assert target.spec.eos_token_ids == (2,)


def test_tokenizer_json_alone(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    data = load_target(directory).tokenizer
    assert data is not None
    assert (data.bos_token, data.eos_token, data.chat_template) == (None, None, None)


def test_without_tokenizer_json_ids_are_served(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    assert load_target(directory).tokenizer is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"bos_token": 3}, ["tokenizer_config.json", "bos_token", "a string"]),
        ({"eos_token": {"id": 3}}, ["eos_token.content", "missing"]),
        ({"chat_template": 3}, ["chat_template", "a string"]),
        ({"chat_template": [{"name": "default"}]}, ["chat_template.template", "missing"]),
    ],
)
def test_bad_tokenizer_config(directory: Path, changes: dict[str, Any], parts: list[str]) -> None:
    edit_json(directory / "tokenizer_config.json", **changes)
    refusal(lambda: load_target(directory), *parts)


def test_bad_tokenizer_json(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    refusal(lambda: load_target(directory), "tokenizer.json", "not a tokenizer")
    (directory / "tokenizer.json").write_text(tokenizer_json(extra=40))
    refusal(lambda: load_target(directory), "tokenizer.json", "ids < 60", "68")


def test_tokenizer_whose_eos_is_split_into_pieces(directory: Path) -> None:
    text = json.loads(tokenizer_json())
    text["added_tokens"] = [token for token in text["added_tokens"] if token["content"] != "</s>"]
    (directory / "tokenizer.json").write_text(json.dumps(text))
    refusal(lambda: load_target(directory), '"</s>" gets other ids', "[2]")


def test_vocabulary_may_be_smaller_than_the_embeddings(directory: Path) -> None:
    edit_json(directory / "config.json", **changed({}, eos_token_id=59))
    assert load_target(directory).spec.eos_token_ids == (59,)
