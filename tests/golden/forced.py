"""Golden drafter cases on the session of ort-cuda, every token but the last forced: what 16 bits do to logits, apart
from what another token does to those after it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from builder.backends.ort_cuda import OrtCuda
from builder.checkpoints.deepspec import load_deepspec
from builder.weights import write_weights
from runtime.manifest import Backend, Limits, Manifest, Memory, Models, Serving, Source
from runtime.sessions.base import DraftRows, SeedRows
from runtime.sessions.ort_cuda import OrtCudaSession
from tests.support import exported_drafter, random_target

FORCED = 1e4
"""Noise that no logit outweighs."""

Array = NDArray[Any]


class ForcedCase:
    """One golden drafter of one sequence, lowered in a precision, with its sequence in slot 0."""

    def __init__(self, golden: Path, name: str, dest: Path, precision: str, device: Any) -> None:
        directory = golden / "drafter" / name
        self.trace = json.loads((directory / "trace.json").read_text())
        self.tensors = load_file(directory / "trace.safetensors")
        drafter = load_deepspec(directory)
        self.block, self.vocab = drafter.spec.block_size, drafter.spec.vocab_size
        embeddings = self.trace["embeddings_file"]
        target = random_target(drafter.spec, directory / embeddings if embeddings else None)
        window = self.trace["context_window"] or 64
        limits = Limits((1,), 1, window, 96, self.block, min(max(self.trace["prompt_chunks"]), window))
        index = write_weights(dest, target, drafter, limits, precision)
        backend, specs = OrtCuda(precision), (target.spec, drafter.spec)
        graphs = exported_drafter(*specs, limits)
        manifest = Manifest(
            format=0, producer="", identity="", backend=Backend("ort-cuda", "", "", "any", precision), limits=limits,
            serving=Serving(self.block, 0.0),
            models=Models(self.vocab, len(drafter.spec.taps) * drafter.spec.hidden_size,
                          drafter.spec.confidence != "none", (), {}, {}),
            engines=backend.compile(graphs, index, limits, dest), state=backend.state(*specs, limits),
            memory=Memory(0, 0, 0, 0), plugins=(), conventions={}, target=Source("", "", {}),
            drafter=Source("", "", {}), files={},
        )  # fmt: skip
        self.taps_dtype = manifest.state[-1].dtype
        self.session = OrtCudaSession(dest, manifest, 1, device=device)
        self._seed()

    def _put_taps(self, rows: Array) -> None:
        values = np.ascontiguousarray(rows, np.float32)
        if self.taps_dtype == "bfloat16":
            bits = values.view(np.uint32)
            values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        self.session._memory.write(self.session._state[-1].address, values)

    def _seed(self) -> None:
        """In pieces that the ring holds: kernels write no row twice."""
        at, end = self.trace["context_first"], self.trace["context_first"] + sum(self.trace["prompt_chunks"])
        while at < end:
            count = min(end - at, self.session.limits.prefill_chunk)
            self._put_taps(self.tensors["taps"][at : at + count])
            self.session.seed(SeedRows(np.array([at]), np.array([count]), np.array([0])))
            at += count

    def rounds(self) -> int:
        return len(self.trace["rounds"])

    def worst(self, r: int) -> dict[str, float]:
        """Greatest difference of a round's corrected logits (as log-probabilities), of the probabilities that they
        make, and of the confidences, as probabilities."""
        at = self.trace["rounds"][r]
        count = self.trace["rounds"][r - 1]["accepted"] + 1 if r else 0
        self._put_taps(self.tensors["taps"][at["start"] - count : at["start"]])
        tokens, corrected = self.tensors["draft_tokens"][r], self.tensors["corrected_logits"][r].astype(np.float64)
        found = {"logits": 0.0, "probabilities": 0.0, "confidence": 0.0}
        for j in range(self.block):
            noise = np.zeros((1, self.block, self.vocab), np.float32)
            noise[0, np.arange(j), tokens[:j]] = FORCED
            out = self.session.draft(
                DraftRows(
                    bonus=np.array([at["bonus_token"]]),
                    start=np.array([at["start"]]),
                    valid_len=np.array([at["start"] - at["context_start"]]),
                    new_len=np.array([count]),
                    slot=np.array([0]),
                    temperature=np.ones(1, np.float32),
                    uniforms=np.full((1, self.block), 0.5, np.float32),
                    noise=noise,
                )
            )
            assert out.q is not None
            assert out.ids[0, :j].tolist() == tokens[:j].tolist()
            wanted = corrected[j] - np.log(np.exp(corrected[j] - corrected[j].max()).sum()) - corrected[j].max()
            q = np.asarray(out.q[0][j], np.float64)
            gaps = {"logits": np.abs(np.log(q) - wanted).max(), "probabilities": np.abs(q - np.exp(wanted)).max()}
            if out.confidence_logits is not None:
                reference = self.tensors["confidence_logits"][r][j]
                gaps["confidence"] = abs(_sigmoid(out.confidence_logits[0, j]) - _sigmoid(reference))
            found = {name: max(value, float(gaps.get(name, 0.0))) for name, value in found.items()}
        return found


def _sigmoid(x: Any) -> float:
    return 1 / (1 + math.exp(-float(x)))
