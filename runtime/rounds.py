"""Carries out the work of a step: prefix copies, prefill chunks, and draft-and-verify rounds.

What is accepted is decided by the pure functions of `runtime.verify`, which rows run by `runtime.scheduler`, what a
slot holds by `runtime.slots`, how much is drafted by `runtime.policy`; this module only carries values between them and
the session. A call that raises fails the requests in it, and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np

from runtime.calls import Calls, Live, running
from runtime.policy import DraftPolicy, Round
from runtime.proposing import Proposer
from runtime.scheduler import Admission, DecodeWork, PrefillWork
from runtime.sequence import NO_DRAFTS, Proposal
from runtime.sequence import Sequence as Running
from runtime.sessions.base import Int64, LogitRows, SlotCopy, TargetRows
from runtime.slots import SlotState, SlotTable


class Rounds:
    """Runs the rows of a step.

    Args:
        calls: makes the session's calls, and ends requests.
        slots: whose states it reads and moves on.
        policy: how much is drafted.
        block_size: B.
        sequences: running requests by id.
    """

    def __init__(
        self,
        calls: Calls,
        slots: SlotTable,
        policy: DraftPolicy,
        block_size: int,
        sequences: Mapping[int, Running],
    ) -> None:
        self._calls = calls
        self._recorder = calls.recorder
        self._slots = slots
        self._policy = policy
        self._proposer = Proposer(calls, policy, block_size)
        self._sequences = sequences

    def admit(self, admitted: Sequence[Admission]) -> None:
        """Copy what admitted requests share with others into their slots, in order."""
        for i, admission in enumerate(admitted):
            row, prefix = self._live(admission), admission.prefix
            try:
                if prefix.source not in (None, admission.slot):
                    began = perf_counter()
                    self._calls.session.copy(_slot_copy(prefix.source, admission.slot, row.state))
                    self._recorder.spend("copy", perf_counter() - began)
            except BaseException as error:
                # Nothing of this and of those after it has been copied: their prompts are run from the start.
                for later in admitted[i:]:
                    self._slots.state(later.slot).keep(0)
                if not isinstance(error, Exception):
                    raise
                self._calls.fail([row], error)
                return
            row.sequence.recorder.reused = prefix.rows
            self._recorder.reused_tokens += prefix.rows

    def prefill(self, work: Sequence[PrefillWork]) -> None:
        """Run a chunk of each row's prompt; a row whose prompt is in then has its first token."""
        began = perf_counter()
        spent = self._calls.spent
        spent.clear()
        counts = {item.request_id: item.count for item in work}
        # Whom admission failed is gone already.
        rows = [self._live(item) for item in work if self._sequences[item.request_id].finished is None]
        chunks = {}
        for row in rows:
            at = row.state.start_pos
            chunks[row.request_id] = row.sequence.request.prompt_ids[at : at + counts[row.request_id]]
        rows = self._make_room(rows, {request: len(chunk) for request, chunk in chunks.items()})
        packed = [chunks[row.request_id] for row in rows]
        out = self._calls.run("prefill", rows, lambda: self._calls.session.prefill(_target_rows(rows, packed)))
        if out is None:
            return
        for i, (row, chunk) in enumerate(zip(rows, packed, strict=True)):
            row.state.prefilled(chunk)
            self._recorder.prompt_tokens += len(chunk)
            if row.state.start_pos == len(row.sequence.request.prompt_ids):
                self._first(row, out.argmax[i : i + 1], out.logits[i : i + 1])
        inside = sum(spent.values())
        host = perf_counter() - began - inside
        self._recorder.spend("host", host)
        for row in rows:
            row.sequence.recorder.prefill += inside
            row.sequence.recorder.host += host

    def decode(self, work: Sequence[DecodeWork], waiting: int) -> None:
        """Run a round of each row: propose, verify, accept, emit. `waiting` requests have no slot."""
        began = perf_counter()
        spent = self._calls.spent
        spent.clear()
        rows = [self._live(item) for item in work]
        drafted = self._proposer.propose(rows, waiting)
        seed = spent.get("seed", 0.0)
        rows = running(rows)
        ids = {row.request_id: [row.sequence.bonus, *drafted.of(row).ids] for row in rows}
        rows = self._make_room(rows, {request: len(row_ids) for request, row_ids in ids.items()})
        packed = [ids[row.request_id] for row in rows]
        out = self._calls.run("verify", rows, lambda: self._calls.session.verify(_target_rows(rows, packed)))
        if out is None:
            return
        at, proposed, accepted = 0, [], []
        for row in rows:
            end = at + 1 + len(drafted.of(row).ids)
            stood = self._commit(row, drafted.of(row), out.argmax[at:end], out.logits[at:end])
            if row.request_id in drafted.proposals:
                proposed.append(end - at - 1)
                accepted.append(stood)
            at = end
        self._policy.observe(
            Round(
                rows=len(rows),
                ids=at,
                verify=spent["verify"],
                drafting=drafted.rows,
                drafts=drafted.drafts,
                draft=spent.get("draft", 0.0),
                seeded=drafted.seeded,
                seed=seed,
                proposed=proposed,
                accepted=accepted,
            )
        )
        host = perf_counter() - began - sum(spent.values())
        self._recorder.spend("host", host)
        for row in rows:
            recorder = row.sequence.recorder
            recorder.draft += spent.get("draft", 0.0) + spent.get("seed", 0.0)
            recorder.verify += spent["verify"]
            recorder.host += host

    def _make_room(self, rows: Sequence[Live], ids: Mapping[int, int]) -> list[Live]:
        """See that each row's tap rows hold as many as the `ids` (by request) that it is about to run: what waits there
        goes into the ring, or is dropped where nobody will draft from it. The rows that are left."""
        full = []
        for row in rows:
            state = row.state
            # What leaves the window before the first draft is not worth its seeding either.
            if not row.sequence.speculates or state.start_pos <= len(row.sequence.request.prompt_ids) - state.window:
                state.drop_taps()
            elif state.tap_room < ids[row.request_id]:
                full.append(row)
        self._calls.seed(full)
        return running(rows)

    def _first(self, row: Live, argmax: Int64, logits: LogitRows) -> None:
        """Accept and emit the token that a finished prefill gives."""
        try:
            _, token = row.sequence.accept(NO_DRAFTS, argmax, logits, row.state.start_pos - 1)
            reason = row.sequence.emit(NO_DRAFTS, token, None, logits)
        except Exception as error:
            self._calls.fail([row], error)
            return
        self._recorder.generated_tokens += len(row.sequence.tokens)
        if reason is not None:
            self._calls.finish(row.request_id, reason, None)

    def _commit(self, row: Live, proposal: Proposal, argmax: Int64, logits: LogitRows) -> int:
        """Accept and emit a round's tokens, and end the request where they say so; how many drafts stood."""
        sequence, before = row.sequence, len(row.sequence.tokens)
        bonus = sequence.bonus
        try:
            accepted, token = sequence.accept(proposal, argmax, logits, row.state.start_pos)
            reason = sequence.emit(proposal, token, accepted, logits)
        except Exception as error:
            self._calls.fail([row], error)
            return 0
        row.state.verified(bonus, proposal.ids, accepted)
        self._recorder.round(len(proposal.ids), accepted, len(sequence.tokens) - before)
        if reason is not None:
            self._calls.finish(row.request_id, reason, None)
        return accepted

    def _live(self, work: Admission | PrefillWork | DecodeWork) -> Live:
        return Live(work.request_id, work.slot, self._sequences[work.request_id], self._slots.state(work.slot))


def _slot_copy(source: int, dest: int, state: SlotState) -> SlotCopy:
    """What `state`, of slot `dest`, counts and `source` holds."""
    ring = min(state.window, state.seeded_until - state.first_seeded)
    return SlotCopy(source, dest, state.start_pos, state.seeded_until - ring, ring, state.pending)


def _target_rows(rows: Sequence[Live], ids: Sequence[Sequence[int]]) -> TargetRows:
    return TargetRows(
        ids=np.array([token for row_ids in ids for token in row_ids]),
        count=np.array([len(row_ids) for row_ids in ids]),
        start=np.array([row.state.start_pos for row in rows]),
        slot=np.array([row.slot for row in rows]),
        tap_row=np.array([row.state.tap_row for row in rows]),
    )
