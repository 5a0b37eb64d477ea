"""Drop a drafter's copies of the target's embeddings and lm_head, so that they are stored once.

DeepSpec starts a drafter from the target's embeddings, freezes them, and saves them with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builder.spec import DrafterCheckpoint, TargetCheckpoint, TensorSource

if TYPE_CHECKING:
    import torch

_ROWS = 8192  # compared at a time: a difference shows at once, and float32 copies stay small


@dataclass(frozen=True)
class _Without:
    """A TensorSource that hides some tensors of another."""

    source: TensorSource
    hidden: frozenset[str]

    def names(self) -> frozenset[str]:
        return self.source.names() - self.hidden

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def read(self, name: str) -> torch.Tensor:
        return self.source.read(name)


def share_with_target(drafter: DrafterCheckpoint, target: TargetCheckpoint) -> DrafterCheckpoint:
    """The drafter without those of its embeddings and lm_head that equal the target's in value (whatever the dtypes).

    Reads the matrices that both have, up to the first difference. The result's `own_embeddings` and `own_lm_head` are
    false for what was dropped.
    """
    head = "model.embed_tokens.weight" if target.spec.tied else "lm_head.weight"
    drop = {
        name
        for name, owned, theirs in (
            ("embed_tokens.weight", drafter.spec.own_embeddings, "model.embed_tokens.weight"),
            ("lm_head.weight", drafter.spec.own_lm_head, head),
        )
        if owned and _equal(drafter.tensors.read(name), target.tensors.read(theirs))
    }
    spec = replace(
        drafter.spec,
        own_embeddings=drafter.spec.own_embeddings and "embed_tokens.weight" not in drop,
        own_lm_head=drafter.spec.own_lm_head and "lm_head.weight" not in drop,
    )
    return replace(drafter, spec=spec, tensors=_Without(drafter.tensors, frozenset(drop)))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if one.shape != other.shape:
        return False
    starts = range(0, one.shape[0], _ROWS)
    return all(torch.equal(one[i : i + _ROWS].float(), other[i : i + _ROWS].float()) for i in starts)
