"""Rotary embedding keys in their several spellings.

``rope_theta`` stands flat in older files and inside ``rope_parameters`` in newer ones; scaling stands in
``rope_scaling`` or ``rope_parameters`` under ``rope_type`` (older: ``type``).
"""

from __future__ import annotations

from builder.checkpoints.config import Config
from builder.spec import RopeSpec

_KINDS = ("default", "linear", "llama3")


def _agreed(holders: list[Config], key: str) -> Config | None:
    """The first of `holders` with `key`, after checking that they all say the same."""
    having = [holder for holder in holders if holder.has(key)]
    for other in having[1:]:
        if other.values[key] != having[0].values[key]:
            other.fail(
                key,
                "contradicts another key of the file",
                expected=f"{having[0].values[key]} as in {having[0].prefix}{key}",
                remedy="Remove the one that is wrong",
            )
    return having[0] if having else None


def parse_rope(config: Config, *, default_theta: float | None = None) -> RopeSpec:
    """The RopeSpec of a Hugging Face or DeepSpec config.

    Args:
        default_theta: what the family means by an absent ``rope_theta``; None where absence is an error.

    Raises:
        CheckpointError: theta missing, keys that contradict each other, or a rope type not supported here.
    """
    nested = [table for key in ("rope_parameters", "rope_scaling") if (table := config.table(key)) is not None]
    for table in nested:
        for key, value in table.values.items():
            if isinstance(value, dict):
                table.fail(
                    key, "rope keys for each layer type", expected="one rope for all layers", remedy="Not supported"
                )
    holders = [*nested, config]
    theta_at = _agreed(holders, "rope_theta")
    if theta_at is not None:
        theta = theta_at.number("rope_theta")
    elif default_theta is not None:
        theta = default_theta
    else:
        config.fail(
            "rope_theta",
            "missing",
            expected="a number, flat or in rope_parameters",
            remedy="Add the theta the model was trained with",
        )
    partial_at = _agreed(holders, "partial_rotary_factor")
    if partial_at is not None and partial_at.number("partial_rotary_factor") != 1.0:
        partial_at.fail("partial_rotary_factor", "partial rotary", expected="1", remedy="Not supported")

    kinds = {
        table.one_of(key, _KINDS, problem="unknown rope type"): table
        for table in nested
        for key in ("rope_type", "type")
        if table.has(key)
    }
    if len(kinds) > 1:
        first = next(iter(kinds.values()))
        config.fail(first.prefix.rstrip("."), "two rope types", expected="one", remedy="Remove the one that is wrong")
    if not kinds:
        for table in nested:
            if table.has("factor"):
                table.fail("rope_type", "missing beside a scaling factor", expected=" or ".join(_KINDS))
        return RopeSpec(theta=theta)
    kind, _ = next(iter(kinds.items()))
    if kind == "default":
        return RopeSpec(theta=theta)
    at = _agreed(nested, "factor") or nested[0]
    factor = at.number("factor")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    low, high = at.number("low_freq_factor"), at.number("high_freq_factor")
    if high <= low:
        at.fail("high_freq_factor", "out of range", expected=f"more than low_freq_factor ({low})")
    original_at = at if at.has("original_max_position_embeddings") else config
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original_at.integer("original_max_position_embeddings", minimum=1),
    )
