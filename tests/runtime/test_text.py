"""`runtime.text`: prompts in, text out in whole characters, stop strings, for the two families of tokenizers."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from runtime.errors import BundleError, RequestError
from runtime.text import TextStream, Tokenizer

TEXT = "Hello wörld, the 日本語 tokens 🙂🙃 stop here. Hello again! naïve € fiancée \n\nEND of the story\n"
TEMPLATE = """
{%- if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif -%}
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
  {% if add_generation_prompt %}
<|im_start|>assistant
  {% endif %}
"""


def byte_level() -> RawTokenizer:
    """GPT-2's kind: bytes as letters, any of which may be a token's end."""
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentencepiece() -> RawTokenizer:
    """Llama-2's kind: words begin with ▁, unknown characters fall back to byte tokens, the first space is dropped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in [*sorted(set("▁Helotsprdwnhaig,.!")), "▁Hello", "▁st", "▁the", "▁world"]:
        vocab[piece] = len(vocab)
    tokenizer = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def save(bundle: Path, raw: RawTokenizer, **config: object) -> Path:
    (bundle / "tokenizer").mkdir(parents=True, exist_ok=True)
    raw.save(str(bundle / "tokenizer/tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "<|im_end|>"} | config
    (bundle / "tokenizer/tokenizer_config.json").write_text(json.dumps(config))
    return bundle


@pytest.fixture(scope="module")
def bytelevel(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    raw = byte_level()
    raw.enable_truncation(5)
    raw.enable_padding(length=12)
    return Tokenizer(save(tmp_path_factory.mktemp("bytelevel"), raw))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(tmp_path_factory.mktemp("spm"), sentencepiece()))


def stream_all(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], stop: tuple[str, ...] = ()
) -> tuple[str, int, bool]:
    """Push `ids` in pieces that end at `cuts`; return the text, the tokens used and whether it stopped."""
    stream, text, used, begin = TextStream(tokenizer, stop), "", 0, 0
    for end in [*sorted(cuts), len(ids)]:
        pushed = stream.push(ids[begin:end])
        text += pushed.text
        used += pushed.tokens_used
        if pushed.stopped:
            assert stream.finish() == ""
            return text, used, True
        begin = end
    return text + stream.finish(), used, False


def test_raw_text_has_the_tokenizers_own_special_tokens(bytelevel: Tokenizer) -> None:
    ids = bytelevel.encode_text(TEXT)
    assert ids[0] == 0
    assert len(ids) > 12, "neither cut nor filled up, whatever tokenizer.json says"
    assert bytelevel.decode(ids) == TEXT
    assert bytelevel.encode_text("a") == [0, *bytelevel.encode_text("a")[1:]]
    assert len(bytelevel.encode_text("a")) == 2


def test_chat(bytelevel: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "skip", "content": "x"}]
    text = bytelevel.render_chat(messages)
    # As transformers' apply_chat_template renders it: blocks on lines of their own leave no line behind.
    assert text == "<s><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    ids = bytelevel.encode_chat(messages)
    assert ids.count(0) == 1, "the template's BOS, not a second one"
    assert ids[:2] == [0, 1]
    assert bytelevel.decode(ids) == "user\nHello\nassistant\n"


def test_template_environment(tmp_path: Path) -> None:
    template = "{{ {'ä': '<&'} | tojson }}{{ strftime_now('%Y')|length }}{{ tools is none }}{{ messages | tojson(1) }}"
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    assert tokenizer.render_chat([{"role": "u", "content": ""}]) == (
        '{"ä": "<&"}4True[\n {\n  "role": "u",\n  "content": ""\n }\n]'
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_templates_that_fail(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(RequestError, match=r"^messages: the chat template refuses them"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_refused_chats(bytelevel: Tokenizer, tmp_path: Path) -> None:
    good = {"role": "user", "content": "x"}
    for messages, message in (
        ([], "messages: not a conversation"),
        (good, "messages: not a conversation"),
        ("x", "messages: not a conversation"),
        ([good, "x"], r"messages\[1\]: wrong type"),
        ([{"role": "user"}], r"messages\[0\].content: missing"),
        ([{"role": 1, "content": "x"}], r"messages\[0\].role: .*found 1"),
        ([good, {"role": "user", "content": None}], r"messages\[1\].content: .*found None"),
        ([{"role": "tool", "content": "x"}], "refuses them; found no tools here"),
    ):
        with pytest.raises(RequestError, match=message):
            bytelevel.encode_chat(messages)
    bare = Tokenizer(save(tmp_path, byte_level(), chat_template=None))
    with pytest.raises(RequestError, match="no chat template"):
        bare.encode_chat([good])


def test_bundle_errors(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)
    save(tmp_path, byte_level())
    config = tmp_path / "tokenizer/tokenizer_config.json"
    for text, message in (
        ("{", "not JSON"),
        ("[]", "wrong type; expected an object"),
        ('{"chat_template": 1}', "chat_template: wrong type; expected a string or null; found 1. Rebuild the bundle"),
        ('{"eos_token": ["</s>"]}', "eos_token: wrong type"),
    ):
        config.write_text(text)
        with pytest.raises(BundleError, match=message):
            Tokenizer(tmp_path)
    config.write_bytes(b"\xff")
    with pytest.raises(BundleError, match="not JSON"):
        Tokenizer(tmp_path)
    config.unlink()
    with pytest.raises(BundleError, match="no such file"):
        Tokenizer(tmp_path)
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer/tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(BundleError, match="not a tokenizer"):
        Tokenizer(tmp_path)


def test_configuration(bytelevel: Tokenizer) -> None:
    assert (bytelevel.bos_token, bytelevel.eos_token) == ("<s>", "<|im_end|>")
    assert bytelevel.special_ids == {0, 1, 2}


def test_a_split_character_is_held_back(bytelevel: Tokenizer) -> None:
    ids = {byte: bytelevel.encode_text(chr(byte))[-1] for byte in b"a"}
    raw = bytelevel.encode_text("\U0001f984")[1:]  # not in the training text: single bytes
    assert len(raw) >= 2
    stream = TextStream(bytelevel)
    for token in raw[:-1]:
        assert stream.push([token]).text == ""
    assert stream.push(raw[-1:]).text == "\U0001f984"
    assert stream.push(raw[:1]).text == ""
    assert stream.push([ids[ord("a")]]).text == "\ufffda", "it will never be whole"
    assert stream.push(raw[:-1]).text == ""
    assert stream.finish() == "\ufffd"


def test_a_character_that_shares_a_token_with_text_before_it(bytelevel: Tokenizer) -> None:
    """The text before an open character is shown at once, and may complete a stop string."""
    ids = bytelevel.encode_text("the story\n")[1:] + bytelevel.encode_text("\U0001f984")[1:2]
    stream = TextStream(bytelevel, ["\n"])
    assert stream.push(ids) == ("the story", True, len(ids) - 1)


def test_leading_spaces_of_sentencepiece(spm: Tokenizer) -> None:
    hello, st_, world = (spm._tokenizer.token_to_id(piece) for piece in ("▁Hello", "▁st", "▁world"))
    eos = 2
    stream = TextStream(spm)
    assert [stream.push([token]).text for token in (eos, hello, st_, eos, world)] == ["", "Hello", " st", "", " world"]
    assert stream.finish() == ""
    euro = [3 + byte for byte in "€".encode()]
    stream = TextStream(spm)
    texts = [stream.push([token]).text for token in [hello, *euro, *euro, world]]
    assert texts == ["Hello", "", "", "€", "", "", "€", " world"]


@given(
    st.lists(st.one_of(st.integers(0, 329), st.integers(100, 240)), max_size=60),
    st.lists(st.integers(0, 60), max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_pieces_are_the_whole_byte_level(bytelevel: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    """Random bytes too, most of which are no characters."""
    cuts = [min(cut, len(ids)) for cut in cuts]
    assert stream_all(bytelevel, ids, cuts) == (bytelevel.decode(ids), len(ids), False)


@given(
    st.lists(st.sampled_from(["Hello", " st", "wö", "€", "🙂", "\n", " "]), max_size=40).map("".join),
    st.lists(st.integers(0, 60), max_size=8),
)
@example("HHHHHHöö€🙂", [])  # a run of byte tokens across the place where the window would be cut
@example("€" * 10, [])  # or cut inside a character
@settings(max_examples=100, deadline=None)
def test_pieces_are_the_whole_sentencepiece(spm: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = spm.encode_text(text)
    cuts = [min(cut, len(ids)) for cut in cuts]
    assert stream_all(spm, ids, cuts) == (spm.decode(ids), len(ids), False)


@given(
    st.lists(
        st.sampled_from(["Hello", " st", "op", "\n", "e", "the", "ö", "日本", "🙂", "!", "\U0001f984"]), max_size=25
    ),
    st.lists(st.text(st.sampled_from("elost\n ö日🙂!"), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 60), max_size=8),
)
@example(["Hello", " st"], ["st", " st"], [])  # both complete at the same token
@settings(max_examples=200, deadline=None)
def test_stop_strings(bytelevel: Tokenizer, words: list[str], stop: list[str], cuts: list[int]) -> None:
    """Against the definition: the first token after which the (whole characters of the) text contains a stop string."""
    ids = bytelevel.encode_text("".join(words))[1:]
    cuts = [min(cut, len(ids)) for cut in cuts]
    expected = (bytelevel.decode(ids), len(ids), False)
    for count in range(1, len(ids) + 1):
        text = bytelevel.decode(ids[:count]).rstrip("\ufffd")
        found = [at for at in (text.find(s) for s in stop) if at >= 0]
        if found:
            expected = (text[: min(found)], count, True)
            break
    assert stream_all(bytelevel, ids, cuts, tuple(stop)) == expected


def test_the_beginning_of_a_stop_string_is_held_back(bytelevel: Tokenizer) -> None:
    stream = TextStream(bytelevel, ["stop", "pq"])
    texts = [stream.push(bytelevel.encode_text(piece)[1:]).text for piece in ("as", "t", "o", "x", "sto")]
    assert texts == ["a", "", "", "stox", ""]
    assert stream.finish() == "sto", "it was not a stop string"
    stream = TextStream(bytelevel, ["stop"])
    block = [token for piece in ("a", "s", "t", "o", "p", "b", "c") for token in bytelevel.encode_text(piece)[1:]]
    assert stream.push(block) == ("a", True, 5)
    assert stream.push(block) == ("", True, 0)
    assert stream.finish() == ""


@pytest.mark.parametrize(
    "kind", ["text", "no characters", "cut characters", "byte tokens", "no characters in byte tokens", "special"]
)
def test_only_a_window_is_decoded(
    bytelevel: Tokenizer, spm: Tokenizer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """3000 tokens, of text or of bytes that never become a character: the cost of a push doesn't grow."""
    emoji = bytelevel.encode_text("\U0001f984")[1:]
    tokenizer, part = {
        "text": (bytelevel, bytelevel.encode_text(TEXT * 100)[1:]),
        "no characters": (bytelevel, emoji[-1:]),
        "cut characters": (bytelevel, emoji[:-1]),
        "byte tokens": (spm, spm.encode_text("🙂")[-4:]),
        "no characters in byte tokens": (spm, spm.encode_text("🙂")[-4:-1]),
        "special": (spm, [2]),
    }[kind]
    ids = (part * 3000)[:3000]
    whole = tokenizer.decode(ids)
    sizes = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, part: list[int]) -> str:
        sizes.append(len(part))
        return decode(self, part)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    assert stream_all(tokenizer, ids, list(range(0, len(ids), 5)))[0] == whole
    assert max(sizes, default=0) <= 24
    assert len(sizes) <= 2.5 * len(ids)


def test_every_piece_is_whole(bytelevel: Tokenizer) -> None:
    stream = TextStream(bytelevel)
    for token in bytelevel.encode_text(TEXT * 2):
        assert not re.search("\ufffd", stream.push([token]).text)
    assert stream.finish() == ""


@pytest.mark.parametrize("prompt", ["a\ud800b", [{"role": "user", "content": "\udfff"}]])
def test_a_lone_surrogate_is_refused(talking_bundle: Path, prompt: object) -> None:
    tokenizer = Tokenizer(talking_bundle)
    with pytest.raises(RequestError, match=r"^prompt: not text: .* expected Unicode text; found U\+D[8-F]"):
        tokenizer.encode_text(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
