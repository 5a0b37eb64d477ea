"""A golden drafter case, played on whatever runs the drafter's graphs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from builder.checkpoints.deepspec import load_deepspec
from runtime.manifest import Limits
from runtime.sessions.base import DraftRows, SeedRows
from tests.support import random_target

TOLERANCE = 1e-4


class Case:
    """One golden drafter with a session that has its sequences in slots 0, 1, …

    `open_session` makes it from (directory, target, drafter, limits); it has a session's `seed` and `draft`, its
    ``_state``, and ``debug``.
    """

    def __init__(self, golden: Path, name: str, dest: Path, open_session: Callable[..., Any]) -> None:
        directory = golden / "drafter" / name
        self.trace = json.loads((directory / "trace.json").read_text())
        tensors = load_file(directory / "trace.safetensors")
        self.sequences = self.trace.get("sequences", [self.trace])
        single = "sequences" not in self.trace
        self.tensors = [
            tensors if single else {k.split(".", 1)[1]: v for k, v in tensors.items() if k.startswith(f"seq{i}.")}
            for i in range(len(self.sequences))
        ]
        drafter = load_deepspec(directory)
        self.block = drafter.spec.block_size
        self.window = self.trace["context_window"] or 64
        embeddings = self.trace["embeddings_file"]
        target = random_target(drafter.spec, directory / embeddings if embeddings else None)
        count = len(self.sequences)
        batches = tuple(sorted({1, count}))
        longest = max(chunk for sequence in self.sequences for chunk in sequence["prompt_chunks"])
        limits = Limits(batches, count, self.window, 96, self.block, longest)
        self.session = open_session(dest, target, drafter, limits)
        self.first = self.trace["context_first"]

    def seed(self, *sequences: int) -> None:
        """The prompts' context rows, in the case's own chunks: a call for the first chunk of each, one for the second,
        and so on."""
        at, slot = np.full(len(sequences), self.first), np.array(sequences)
        for nth in itertools.zip_longest(*(self.sequences[i]["prompt_chunks"] for i in sequences), fillvalue=0):
            count = np.array(nth)
            for i, first, n in zip(sequences, at, count, strict=True):
                self.session._state["taps"][i, :n] = self.tensors[i]["taps"][first : first + n]
            rows = count > 0
            self.session.seed(SeedRows(at[rows], count[rows], slot[rows]))
            at += count
        assert at.tolist() == [self.sequences[i]["prompt_len"] for i in sequences]

    def draft(self, rows: list[tuple[int, int]]) -> list[dict[str, np.ndarray]]:
        """Round r of sequence i for each (i, r), in one call; the outputs of each row."""
        start, valid, new = [], [], []
        for i, r in rows:
            at = self.sequences[i]["rounds"][r]
            count = self.sequences[i]["rounds"][r - 1]["accepted"] + 1 if r else 0
            self.session._state["taps"][i, :count] = self.tensors[i]["taps"][at["start"] - count : at["start"]]
            # What lies behind the accepted rows is the rejected drafts': anything at all.
            self.session._state["taps"][i, count:] = 1e3
            start.append(at["start"])
            valid.append(at["start"] - at["context_start"])
            new.append(count)
        out = self.session.draft(
            DraftRows(
                bonus=np.array([self.sequences[i]["rounds"][r]["bonus_token"] for i, r in rows]),
                start=np.array(start),
                valid_len=np.array(valid),
                new_len=np.array(new),
                slot=np.array([i for i, _ in rows]),
                temperature=np.zeros(len(rows), np.float32),
                uniforms=np.zeros((len(rows), self.block), np.float32),
            )
        )
        results = {"ids": out.ids, **self.session.debug}
        if out.confidence_logits is not None:
            results["confidence_logits"] = out.confidence_logits
        return [{name: value[k].copy() for name, value in results.items()} for k in range(len(rows))]

    def check(self, i: int, r: int, out: dict[str, np.ndarray]) -> None:
        expected = self.tensors[i]
        for name, reference in (("hidden", "block_hidden"), ("base", "base_logits"), ("corrected", "corrected_logits")):
            np.testing.assert_allclose(out[name], expected[reference][r], rtol=0, atol=TOLERANCE, err_msg=f"{name} {r}")
        np.testing.assert_array_equal(out["ids"], expected["draft_tokens"][r])
        assert ("confidence_logits" in out) == ("confidence_logits" in expected)
        if "confidence_logits" in out:
            np.testing.assert_allclose(
                out["confidence_logits"], expected["confidence_logits"][r], rtol=0, atol=TOLERANCE, err_msg=f"round {r}"
            )
