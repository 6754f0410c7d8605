"""What rota promises of effects: of all that record a key, one is told to cause it.

While that one holds its lease nobody else is told anything; once it has lost it, nobody can
know whether it happened, and who comes next says what to do then.
"""

from __future__ import annotations

from typing import Any

from model.pipelines import Pipelines
from model.rows import Ref, Refused, Rows


class Ledger(Pipelines):
    """The model with its effects."""

    def record_effect(
        self, scope: str, key: str, job_id: int, lease_token: int, if_unknown: str
    ) -> Rows:
        self._held(job_id, lease_token)
        record = self.effects.get((scope, key))
        if record is not None:
            if record[3] is not None:
                return [[False]]
            if record[:2] != [job_id, lease_token] and self.holds(*record[:2]):
                raise Refused("RT010")
            if if_unknown == "skip":
                return [[False]]
        self.effects[scope, key] = [job_id, lease_token, self.now, None, None]
        return [[True]]

    def complete_effect(
        self, scope: str, key: str, job_id: int, lease_token: int, result: Any
    ) -> Rows:
        record = self.effects.get((scope, key), [0, 0, 0, None, None])
        if record[:2] == [job_id, lease_token] and record[3] is not None:
            return [["already_completed"]]
        self._hold_open(record, (job_id, lease_token))
        record[3:] = [self.now, result]
        return [["completed"]]

    def withdraw_effect(self, scope: str, key: str, job_id: int, lease_token: int) -> Rows:
        self._hold_open(self.effects.get((scope, key), [0, 0, 0, None]), (job_id, lease_token))
        del self.effects[scope, key]
        return [[None]]

    def settle_effect(self, scope: str, key: str, outcome: str, result: Any) -> Rows:
        record = self.effects.get((scope, key))
        if record is None or record[3] is not None:
            raise Refused("RT011")
        if self.holds(*record[:2]):
            raise Refused("RT010")
        if outcome == "again":
            del self.effects[scope, key]
        else:
            record[3:] = [self.now, result]
        return [[record[0]]]

    def _hold_open(self, record: list[Any], ref: Ref) -> None:
        """Refuse whoever does not hold the open record."""
        self._held(*ref)
        if record[:2] != [*ref] or record[3] is not None:
            raise Refused("RT011")
