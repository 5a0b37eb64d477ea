"""What ``coupling="gumbel"`` costs in acceptance against rejection sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime import Engine, Request, Result, SamplingParams
from tests.bench.arithmetic import acceptance_by_position
from tests.bench.decoding import FIXED
from tests.bench.plan import BenchPrompt, Plan
from tests.bench.serving import serve

COUPLINGS = ("rejection", "gumbel")
TEMPERATURES = (0.7, 1.0)
_CONCURRENCY = 8


def measure_coupling(engine: Engine, prompts: Sequence[BenchPrompt], plan: Plan) -> dict[str, object]:
    """Tokens a round of both couplings at each temperature: the same prompts, and the bundle's default number of drafts
    in every round. Nothing here depends on time.
    """
    result: dict[str, object] = {}
    for temperature in TEMPERATURES:
        made = {}
        for coupling in COUPLINGS:
            requests = [
                Request(
                    prompt_ids=prompt.ids,
                    max_new_tokens=plan.coupling_tokens,
                    sampling=SamplingParams(temperature=temperature, seed=0, coupling=coupling),
                    draw_stream=stream,
                    **FIXED,
                )
                for stream, prompt in enumerate(prompts)
            ]
            made[coupling] = _acceptance(serve(engine, requests, _CONCURRENCY).results)
        ratio = made["gumbel"]["tokens_per_round"] / made["rejection"]["tokens_per_round"]
        result[str(temperature)] = {**made, "gumbel_to_rejection": ratio}
    return result


def _acceptance(results: Sequence[Result]) -> dict[str, Any]:
    stats = [result.stats for result in results]
    rounds = sum(s.rounds for s in stats)
    emitted = sum(len(r.token_ids) - 1 for r in results if r.stats.rounds)
    return {
        "tokens_per_round": emitted / rounds,
        "rounds": rounds,
        "acceptance_by_position": acceptance_by_position(
            [n for s in stats for n in s.proposed], [n for s in stats for n in s.accepted]
        ),
    }
