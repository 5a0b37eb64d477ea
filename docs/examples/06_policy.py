"""Decide yourself how much is drafted: at most so many drafts a step, and of each request only the likely ones.

python docs/examples/06_policy.py engines/build/smollm2-135m
"""

import sys
from collections.abc import Sequence

from runtime import Engine, Request, StaticPolicy
from runtime.policy import Load, Row


class Budget(StaticPolicy):
    """Shares `drafts` a step among the requests that may draft; keeps a draft while all so far may well be accepted."""

    def __init__(self, drafts: int, least_chance: float) -> None:
        self.drafts = drafts
        self.least_chance = least_chance

    def caps(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        share = self.drafts // len(rows)
        return [min(row.cap, share) for row in rows]  # 0: the request decodes plainly in this step

    def lengths(self, rows: Sequence[Row], load: Load) -> Sequence[int]:
        return [self._length(row) for row in rows]

    def _length(self, row: Row) -> int:
        chance = 1.0
        for k in range(row.drafted):  # draft by draft: whether k stays must not depend on a confidence after k's
            chance *= row.confidence(k)
            if chance < self.least_chance:
                return k
        return row.drafted


with Engine(sys.argv[1], policy=Budget(drafts=6, least_chance=0.3)) as engine:
    if engine.tokenizer is None:
        sys.exit("this bundle serves token ids only")
    for subject in ("the sea", "winter", "old books"):
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": f"Write a sentence about {subject}."}])
        engine.submit(Request(prompt_ids=tuple(ids), max_new_tokens=40))
    before, most = 0, 0
    while not engine.idle:
        engine.step()
        proposed = sum(engine.stats().proposed)
        before, most = proposed, max(most, proposed - before)

    stats = engine.stats()
    print(f"{sum(stats.accepted)} of {sum(stats.proposed)} drafts accepted, at most {most} in a step")
