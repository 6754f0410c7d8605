"""What rota promises, as sentences that a recorded history can break.

The checker names a broken promise by its number; README.md of the tests says which room shows
which.
"""

from __future__ import annotations

from dataclasses import dataclass

PROMISE = {
    "I1": "live leases of a job never overlap",
    "I2": "the lease tokens of a job grow",
    "I3": "no stale token is accepted by anything, ever",
    "I4": "an acknowledged enqueue ends once, and one that was rolled back never was",
    "I5": "one job per key in its scope",
    "I6": "attempts are at most max_attempts, and grants less what was given back",
    "I7": "nothing starts before its run_at, and retries wait as their backoff says",
    "I8": "what has ended does not change without an operator",
    "I9": "a planned time of a schedule makes at most one job",
    "I10": "once the faults stop, what is due is granted within lease + sweep + 2 s",
    "I11": "statistics equal a recount",
    "I12": "every error has an SQLSTATE that is documented for its function",
    "I13": "nobody reads a payload outside of his role",
}
ELSEWHERE = {"I13": "not in a history: security/test_matrix.py plays every role and function"}


@dataclass(frozen=True)
class Violation:
    """A promise that was broken, in which way, and by the history of which job or key."""

    promise: str
    problem: str
    subject: str = ""
    story: str = ""

    def __str__(self) -> str:
        return f"{self.promise}: {PROMISE[self.promise]}: {self.problem}"
