"""How much is measured, and on what prompts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from runtime.text import Tokenizer

KINDS = ("school_maths", "code", "chat", "maths")
_PROMPTS = Path(__file__).parent / "prompts.json"
_RECORDED = Path(__file__).parents[1] / "golden" / "real_pair.json"


@dataclass(frozen=True)
class Plan:
    """Counts of everything that is repeated.

    `prompts` are those of each kind, `hf_prompts` the part of them that Hugging Face transformers runs too; `threads`
    is what every library gets. A point of `concurrency` c serves 2c requests in each of `turns`, or `least_requests`.
    """

    prompts: int = 6
    tokens: int = 128
    repeats: int = 2
    hf_prompts: int = 2
    hf_tokens: int = 64
    hf_repeats: int = 3
    call_repeats: int = 30
    profile_calls: int = 20
    startups: int = 5
    sweep_prompts: int = 3
    sweep_tokens: int = 128
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16)
    least_requests: int = 6
    concurrent_tokens: int = 96
    turns: int = 3
    step_batch: int = 8
    steps: int = 60
    coupling_prompts: int = 40
    coupling_tokens: int = 96
    memory_requests: int = 10_000
    threads: int = 2


QUICK = Plan(
    prompts=1,
    tokens=24,
    repeats=1,
    hf_prompts=1,
    hf_tokens=8,
    hf_repeats=1,
    call_repeats=3,
    profile_calls=3,
    startups=1,
    sweep_prompts=1,
    sweep_tokens=24,
    concurrency=(1, 4, 16),
    least_requests=2,
    concurrent_tokens=12,
    turns=1,
    steps=12,
    coupling_prompts=8,
    coupling_tokens=12,
    memory_requests=2_000,
)
"""Exercises every part in a few minutes; its figures say little."""


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as token ids, chat template and all. `name` is its kind and number."""

    name: str
    kind: str
    ids: tuple[int, ...]


def read_messages() -> dict[str, list[list[dict[str, str]]]]:
    """The chats of ``prompts.json`` by kind."""
    data: dict[str, list[list[dict[str, str]]]] = json.loads(_PROMPTS.read_text(encoding="utf-8"))
    return data


def read_prompts(tokenizer: Tokenizer, each: int) -> list[BenchPrompt]:
    """The first `each` prompts of every kind, kinds taking turns: what drifts during a run touches all alike."""
    chats = read_messages()
    return [
        BenchPrompt(f"{kind}/{number}", kind, tuple(tokenizer.encode_chat(chats[kind][number])))
        for number in range(each)
        for kind in KINDS
        if number < len(chats[kind])
    ]


def many_prompts(tokenizer: Tokenizer) -> list[BenchPrompt]:
    """Every prompt there is, those that were recorded with the reference evaluator among them: no two alike, in a mixed
    order that is always the same.
    """
    recorded = json.loads(_RECORDED.read_text(encoding="utf-8"))["prompts"]
    prompts = [
        BenchPrompt(f"recorded/{number}", prompt["kind"], tuple(prompt["prompt_ids"]))
        for number, prompt in enumerate(recorded)
    ]
    prompts += read_prompts(tokenizer, max(map(len, read_messages().values())))
    return random.Random(0).sample(prompts, len(prompts))
