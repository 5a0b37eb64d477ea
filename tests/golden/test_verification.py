"""verification.json against the pure functions of `runtime.verify`: acceptance, emission, the loop, exact
distributions."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from runtime.verify import accept_greedy, acceptance_probability, emit, residual, sampled_outcome


@pytest.fixture(scope="module")
def vectors(golden: Path) -> dict[str, list[dict]]:
    return json.loads((golden / "verification.json").read_text())


def test_greedy(vectors: dict[str, list[dict]]) -> None:
    assert vectors["greedy"]
    for case in vectors["greedy"]:
        expected, proposed = case["expected"], case["proposed"]
        accepted, next_token = accept_greedy(proposed, np.array(case["target_argmax"]))
        out = emit([*proposed[:accepted], next_token], frozenset(case["stop_token_ids"] or ()), len(proposed) + 1)
        assert list(out.tokens) == expected["emitted"], case["name"]
        assert out.accepted == expected["accepted"], case["name"]
        stopped_in_drafts = out.stopped and len(out.tokens) == out.accepted
        assert stopped_in_drafts == expected["terminated_by_stop_token"], case["name"]
        # The reference reports the target's token after the cut prefix, which here is never emitted.
        assert case["target_argmax"][out.accepted] == expected["next_token"], case["name"]
        if not stopped_in_drafts:
            assert next_token == expected["next_token"], case["name"]


def test_loop(vectors: dict[str, list[dict]]) -> None:
    """The reference's loop: rounds go on while ``start < prompt + max_new_tokens``, so one may emit nothing."""
    assert vectors["loop"]
    for case in vectors["loop"]:
        stop, limit = frozenset(case["stop_token_ids"] or ()), case["max_new_tokens"]
        target, expected, proposals = case["target_continuation"], case["expected"], iter(case["proposals"])
        first = emit(target[:1], stop, limit)
        tokens, stopped, done = list(first.tokens), first.stopped, 1  # done: committed, beyond the limit too
        lengths, proposed_lengths, accepted_lengths = [], [], []
        while not stopped and done - 1 < limit:
            proposed = next(proposals)
            accepted, next_token = accept_greedy(proposed, target[done : done + len(proposed) + 1])
            out = emit([*proposed[:accepted], next_token], stop, limit - len(tokens))
            # Whether the round stopped is asked without the limit, as the reference does.
            whole = emit([*proposed[:accepted], next_token], stop, accepted + 1)
            in_drafts = whole.stopped and len(whole.tokens) == whole.accepted
            tokens += out.tokens
            lengths.append(out.accepted if in_drafts else out.accepted + 1)
            proposed_lengths.append(out.accepted if in_drafts else len(proposed))
            accepted_lengths.append(out.accepted)
            done += len(whole.tokens)
            stopped = whole.stopped
        assert next(proposals, None) is None, case["name"]
        assert tokens == expected["new_tokens"], case["name"]
        assert lengths == expected["acceptance_lengths"], case["name"]
        assert proposed_lengths == expected["proposal_lengths"], case["name"]
        assert accepted_lengths == expected["accepted_draft_lengths"], case["name"]
        assert len(lengths) == expected["verify_count"], case["name"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sampling(vectors: dict[str, list[dict]], dtype: type) -> None:
    assert vectors["sampling"]
    for case in vectors["sampling"]:
        p, q = np.array(case["target_probs"], dtype), np.array(case["draft_probs"], dtype)
        proposed, uniforms, expected = case["proposals"], np.array(case["uniforms"], dtype), case["expected"]
        accepted, distribution = sampled_outcome(proposed, q, p.__getitem__, uniforms)
        stop = frozenset(case["stop_token_ids"] or ())
        out = emit([*proposed[:accepted], -1], stop, len(proposed) + 1)
        assert out.accepted == expected["accepted"], case["name"]
        assert out.stopped == expected["terminated_by_stop_token"], case["name"]
        if (
            out.accepted < accepted
        ):  # cut: the reference then reports the distribution after the cut prefix, which is never drawn from
            distribution = residual(p[out.accepted], q[out.accepted])
        assert np.abs(distribution - expected["next_distribution"]).max() <= 1e-6, case["name"]
        source = expected["next_source"]
        if source == "target_last":
            assert accepted == len(proposed), case["name"]
        elif source == "residual_fallback_to_target":
            assert np.array_equal(distribution, p[out.accepted]), case["name"]
        else:
            assert source == "residual", case["name"]
            assert accepted < len(proposed), case["name"]


def test_exact(vectors: dict[str, list[dict]]) -> None:
    """Every chain of two drafts, with its probability, through the pieces that `accept_sampled` is made of."""
    assert vectors["exact"]
    for case in vectors["exact"]:
        p1, p2, p3 = (np.array(case[key]) for key in ("p1", "p2_given_x1", "p3_given_x1_x2"))
        q1, q2 = np.array(case["q1"]), np.array(case["q2_given_x1"])
        size = len(p1)
        first, counts = np.zeros(size), np.zeros(3)
        joint = np.zeros((size, size))  # of the first two emitted tokens
        for x1, x2 in itertools.product(range(size), repeat=2):
            chain = q1[x1] * q2[x1, x2]
            a1, a2 = acceptance_probability(p1, q1, x1), acceptance_probability(p2[x1], q2[x1], x2)
            # Uniforms just below the probabilities accept, uniforms at them reject (strictly less).
            for u1, u2, weight, count in (
                (a1, 0.0, 1 - a1, 0),
                (a1 - 1e-9, a2, a1 * (1 - a2), 1),
                (a1 - 1e-9, a2 - 1e-9, a1 * a2, 2),
            ):
                if chain * weight <= 0:
                    continue
                accepted, distribution = sampled_outcome(
                    [x1, x2], np.stack([q1, q2[x1]]), [p1, p2[x1], p3[x1, x2]].__getitem__, np.array([u1, u2])
                )
                assert accepted == count, case["name"]
                counts[accepted] += chain * weight
                if accepted == 0:
                    first += chain * weight * distribution
                    joint += chain * weight * distribution[:, None] * p2  # a later round goes on from the target
                else:
                    first[x1] += chain * weight
                    joint[x1] += chain * weight * (distribution if accepted == 1 else np.eye(size)[x2])
        assert np.abs(first - case["expected"]["first_token_marginal"]).max() <= 1e-6, case["name"]
        assert np.abs(counts - case["expected"]["accepted_count_distribution"]).max() <= 1e-6, case["name"]
        assert np.abs(joint - p1[:, None] * p2).max() <= 1e-6, case["name"]
