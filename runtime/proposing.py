"""What a round proposes: how much is drafted for whom, in one draft call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.calls import Calls, Live, running
from runtime.errors import RequestError
from runtime.policy import DraftPolicy, Load, Row
from runtime.sequence import NO_DRAFTS, Proposal
from runtime.sessions.base import DraftRows


@dataclass(frozen=True)
class Drafted:
    """What a round's draft call gave: proposals by request, the `rows` it drafted for, up to how many `drafts`, and how
    many tap rows had to be `seeded` before."""

    proposals: Mapping[int, Proposal]
    rows: int
    drafts: int
    seeded: int

    def of(self, row: Live) -> Proposal:
        return self.proposals.get(row.request_id, NO_DRAFTS)


_NOTHING = Drafted({}, 0, 0, 0)


class Proposer:
    """Drafts for the rows of a round, as much as their requests allow and the policy finds worth it.

    Args:
        calls: makes the draft call.
        policy: is asked about every row that it may decide on, see `runtime.policy.Row`.
        block_size: B.
    """

    def __init__(self, calls: Calls, policy: DraftPolicy, block_size: int) -> None:
        self._calls = calls
        self._policy = policy
        self._block_size = block_size

    def propose(self, rows: Sequence[Live], waiting: int) -> Drafted:
        """Draft for every row that may and should, in one call of as many tokens as the longest takes. Rows that fail
        are ended. `waiting` requests have no slot."""
        # A draft call moves no more tap rows into the ring than a round leaves.
        most = self._block_size + 1
        behind = {row.request_id: row.state.pending for row in rows if row.state.pending > most}
        views = {
            row.request_id: row.sequence.policy_row(cap, behind.get(row.request_id, 0))
            for row in rows
            if (cap := row.sequence.draft_cap())
        }
        decided = [row for row in rows if row.request_id in views and row.sequence.adaptive]
        caps = {request: view.cap for request, view in views.items()}
        load = _load(rows, decided, caps, waiting)
        if decided:
            chosen = self._policy.caps([views[row.request_id] for row in decided], load)
            for row, cap in zip(decided, chosen, strict=True):
                caps[row.request_id] = min(max(cap, 0), views[row.request_id].cap)
        drafting = [row for row in rows if caps.get(row.request_id)]
        seeded = self._calls.seed([row for row in drafting if row.request_id in behind])
        drafting = running(drafting)
        drafts = max((caps[row.request_id] for row in drafting), default=0)
        out = self._calls.run("draft", drafting, lambda: self._calls.session.draft(_draft_rows(drafting, drafts)))
        if out is None:
            return _NOTHING
        for k, row in enumerate(drafting):
            row.state.seeded()
            logits = None if out.confidence_logits is None else out.confidence_logits[k]
            views[row.request_id].draft(caps[row.request_id], logits)
        lengths = self._lengths(drafting, decided, views, load)
        proposals = {}
        for k, row in enumerate(drafting):
            length = lengths[row.request_id]
            if row.sequence.rejection:
                try:
                    views[row.request_id].check_causal(length)
                except RequestError as error:
                    self._calls.fail([row], error)
                    continue
            q = out.q[k][:length] if row.sequence.rejection and out.q is not None else None
            proposals[row.request_id] = Proposal(out.ids[k, :length].tolist(), q)
        return Drafted(proposals, len(drafting), drafts, seeded)

    def _lengths(
        self, drafting: Sequence[Live], decided: Sequence[Live], views: Mapping[int, Row], load: Load
    ) -> dict[int, int]:
        """How many drafts of each row are verified, by request."""
        lengths = {row.request_id: -1 for row in drafting}
        asked = [row.request_id for row in decided if row.request_id in lengths]
        if asked:
            lengths.update(zip(asked, self._policy.lengths([views[request] for request in asked], load), strict=True))
        for request in lengths.keys() - asked:
            lengths[request] = views[request].confident()
        return {request: min(max(length, 0), views[request].drafted) for request, length in lengths.items()}


def _load(rows: Sequence[Live], decided: Sequence[Live], caps: Mapping[int, int], waiting: int) -> Load:
    asked = {row.request_id for row in decided}
    others = [caps.get(row.request_id, 0) for row in rows if row.request_id not in asked]
    return Load(len(others), len(others) + sum(others), sum(cap > 0 for cap in others), waiting)


def _draft_rows(rows: Sequence[Live], drafts: int) -> DraftRows:
    windows = [row.state.draft_window() for row in rows]
    uniforms = np.zeros((len(rows), drafts), np.float32)
    noise = None
    for k, row in enumerate(rows):
        start = windows[k].start_pos
        drawn = row.sequence.draft_uniforms(start, drafts)
        if drawn is not None:
            uniforms[k] = drawn
        added = row.sequence.draft_noise(start, drafts)
        if added is not None:
            if noise is None:
                noise = np.zeros((len(rows), *added.shape), np.float32)
            noise[k] = added
    return DraftRows(
        bonus=np.array([row.sequence.bonus for row in rows]),
        start=np.array([window.start_pos for window in windows]),
        valid_len=np.array([window.valid_len for window in windows]),
        new_len=np.array([window.new_len for window in windows]),
        slot=np.array([row.slot for row in rows]),
        temperature=np.array([row.sequence.draft_temperature for row in rows], np.float32),
        uniforms=uniforms,
        noise=noise,
    )
