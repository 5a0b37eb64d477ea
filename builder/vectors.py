"""A bundle's own vectors: a short conversation with the float32 torch modules, which `validate` replays on the engines.

Nothing here touches an engine or an inference library. The file is ``vectors.npz``:

- ``prompt`` int64 ``[P]`` and ``chunks`` int64: prefilled in these sizes, ``prefill.logits`` float32 ``[chunks, V]``
  after each;
- for each round r: ``r.inputs`` int64 ``[bonus, start, valid_len, new_len]``, ``r.temperature``, ``r.uniforms`` ``[B]``
  and ``r.noise``, the factor of `runtime.validate.draft_noise` (inputs of draft), ``r.ids`` ``[B]``,
  ``r.confidence`` ``[B]`` (with a head), ``r.q`` ``[B, V]`` (rounds that sample), ``r.margin`` (least gap between what
  was picked and the next best); ``r.verify_ids`` ``[B+1]`` and ``r.logits`` ``[B+1, V]``.

How many drafts a round accepts is scripted, so a replay never depends on what an engine picked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from builder.export import modules
from builder.spec import DrafterSpec, TargetSpec
from builder.weights import WeightIndex
from runtime.manifest import Limits
from runtime.validate import TOLERANCE, VECTORS_NAME, draft_noise

_PROMPT = 24
_SEED = 20260
# Low, so that most uniforms fall well inside a probable token: an id then says something of the engine that draws it.
_TEMPERATURE = 0.3
# High, so that other tokens are picked than without it: else the ids would say nothing of an engine that ignores it.
_NOISE = 3.0
_TRIES = 8


def record(dest: Path, target: TargetSpec, drafter: DrafterSpec, weights: WeightIndex, limits: Limits) -> None:
    """Run the modules on `weights` and write ``vectors.npz`` under `dest`."""
    with torch.no_grad():
        # Any: savez has a keyword of its own besides the arrays.
        arrays: dict[str, Any] = Recorder(target, drafter, weights, limits).run()
    np.savez(dest / VECTORS_NAME, **arrays)


def reference_modules(
    target: TargetSpec, drafter: DrafterSpec, weights: WeightIndex, limits: Limits
) -> dict[str, nn.Module]:
    """Target, draft and seed with their weights mapped from the file."""
    nets = modules(target, drafter, limits)
    for name, net in nets.items():
        prefix = "target" if name == "target" else "drafter"
        state = {key: torch.from_numpy(weights.array(f"{prefix}.{key}")) for key in net.state_dict()}
        net.load_state_dict(state, assign=True)
    return nets


def _script(block: int, max_seq_len: int) -> list[int]:
    """Accepted drafts of each round: some, all, none; as many as leave each bonus within the sequence."""
    rounds: list[int] = []
    for accepted in (min(2, block), block, 0):
        if sum(a + 1 for a in rounds) > max_seq_len - 2:
            break
        rounds.append(accepted)
    return rounds


class Recorder:
    """Plays one request on the reference modules, in slot 0 of one (and a scratch slot)."""

    def __init__(self, target: TargetSpec, drafter: DrafterSpec, weights: WeightIndex, limits: Limits) -> None:
        self.limits = limits
        self.nets = reference_modules(target, drafter, weights, limits)
        self.vocab = target.vocab_size
        self.block = drafter.block_size
        self.has_confidence = drafter.confidence != "none"
        self.script = _script(self.block, limits.max_seq_len)
        before_last = sum(accepted + 1 for accepted in self.script[:-1])
        # A prompt that wraps a small ring; of a large one the golden vectors speak.
        wanted = max(_PROMPT, limits.window + 5 if limits.window <= 64 else 0)
        self.prompt_len = min(wanted, limits.max_seq_len - 1 - before_last)
        # As long as the script needs, not as long as the engines allow.
        rows = self.prompt_len + before_last + self.block + 1
        self.caches = [torch.zeros(2, target.num_kv_heads, rows, target.head_dim) for _ in range(2 * target.num_layers)]
        self.rings = [
            torch.zeros(2, drafter.num_kv_heads, limits.window, drafter.head_dim) for _ in range(2 * drafter.num_layers)
        ]
        self.taps = torch.zeros(2, self.block + 1, len(drafter.taps) * drafter.hidden_size)

    def run(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(_SEED)
        prompt = rng.integers(0, self.vocab, self.prompt_len)
        longest = max(1, min(self.limits.prefill_chunk, 16))
        chunks = [min(longest, self.prompt_len - at) for at in range(0, self.prompt_len, longest)]
        arrays: dict[str, np.ndarray] = {"prompt": prompt, "chunks": np.array(chunks)}
        at, logits = 0, []
        for chunk in chunks:
            out, taps = self._target(prompt[at : at + chunk], at, [chunk - 1])
            logits.append(out[0])
            rows = (torch.tensor([value]) for value in (at, chunk, 0))
            self.rings = list(self.nets["seed"](taps, *rows, self.rings))
            at += chunk
        arrays["prefill.logits"] = np.stack(logits)
        bonus, start, new_len = int(logits[-1].argmax()), self.prompt_len, 0
        for r, accepted in enumerate(self.script):
            # One round is drawn by inverse CDF, one by Gumbel noise, where there are so many, the others take the best.
            temperature, noise = _TEMPERATURE if r == 0 else 0.0, _NOISE if r == 1 else 0.0
            inputs = (bonus, start, min(self.limits.window, start), new_len)
            for _ in range(_TRIES):
                uniforms = (rng.integers(0, 2**23, self.block) / 2**23).astype(np.float32)
                ids = self._draft(arrays, f"{r}", inputs, temperature, uniforms, noise)
                # A uniform that falls near a running sum would say nothing of an engine that draws differently.
                if temperature == 0 or arrays[f"{r}.margin"] > TOLERANCE["f32"].sampling_margin:
                    break
            verify_ids = np.array([bonus, *ids])
            out, taps = self._target(verify_ids, start, list(range(self.block + 1)))
            self.taps[0] = taps[0]
            arrays |= {f"{r}.verify_ids": verify_ids, f"{r}.logits": out}
            bonus, start, new_len = int(out[accepted].argmax()), start + accepted + 1, accepted + 1
        return arrays

    def _target(self, ids: np.ndarray, start: int, rows: list[int]) -> tuple[np.ndarray, Tensor]:
        """Logits ``[rows, V]`` and taps ``[1, w, T·H]``; the caches move on."""
        _, logits, taps, *self.caches = self.nets["target"](
            torch.from_numpy(ids)[None], torch.tensor([start]), torch.tensor([0]), torch.tensor([rows]), self.caches
        )
        return logits[0].numpy(), taps

    def _draft(
        self,
        arrays: dict[str, np.ndarray],
        name: str,
        inputs: tuple[int, int, int, int],
        temperature: float,
        uniforms: np.ndarray,
        noise: float,
    ) -> np.ndarray:
        rows = [torch.tensor([value]) for value in inputs]
        out = list(
            self.nets["draft"](
                *rows,
                torch.tensor([0]),
                torch.tensor([temperature]),
                torch.from_numpy(uniforms)[None],
                torch.from_numpy(draft_noise(noise, inputs[1], self.block, self.vocab)),
                self.taps,
                self.rings,
            )
        )
        ids: np.ndarray = out.pop(0)[0].numpy()
        arrays |= {
            f"{name}.inputs": np.array(inputs),
            f"{name}.temperature": np.array(temperature, np.float32),
            f"{name}.uniforms": uniforms,
            f"{name}.noise": np.array(noise, np.float32),
            f"{name}.ids": ids,
        }
        if self.has_confidence:
            arrays[f"{name}.confidence"] = out.pop(0)[0].numpy()
        q, _, _, corrected, *self.rings = out
        if temperature > 0:
            arrays[f"{name}.q"] = q[0].numpy()
            cdf = q[0].double().cumsum(-1)
            gaps = cdf - torch.from_numpy(uniforms)[:, None] * cdf[:, -1:]
        else:
            best = corrected[0].topk(2).values
            gaps = best[:, 0] - best[:, 1]
        arrays[f"{name}.margin"] = np.array(float(gaps.abs().min()), np.float32)
        return ids
