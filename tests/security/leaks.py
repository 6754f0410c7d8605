"""Calls that go wrong, with secrets in whatever they are given, and the log of the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb

SECRET, KEY = "c4n4ry-payload", "c4n4ry-key"
DEFAULTS = {
    "log_statement": "none",
    "log_min_error_statement": "error",
    "log_min_duration_statement": "-1",
    "log_min_messages": "warning",
    "log_error_verbosity": "default",
    "log_parameter_max_length_on_error": "0",
}


class ServerLog:
    """What the server has logged since this object was made."""

    def __init__(self, server: Any) -> None:
        self._path = Path(server._server.base_dir, f"{server._server.name}.log")
        self._start = self._path.stat().st_size

    def lines(self, word: str) -> list[str]:
        with self._path.open("rb") as file:
            file.seek(self._start)
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if word in line]


# What a caller got wrong, as changes of the arguments of a good call (scene.py).
MISTAKES: dict[str, Any] = {
    "an old token": lambda s: {"token": s["token"] - 1, "tokens": [s["token"] - 1]},
    "no such job": lambda _: (
        dict.fromkeys(("job_id", "waiting", "dead", "ended"), 10**15) | {"job_ids": [10**15]}
    ),
    "another's job": lambda s: {"job_id": s["waiting"], "job_ids": [s["waiting"]]},
    "an ended job": lambda s: dict.fromkeys(("job_id", "waiting", "dead"), s["ended"]),
    "a live job": lambda s: {"dead": s["job_id"], "ended": s["job_id"]},
    "another key": lambda s: {"key": s["key"] + "2"},
    "nulls": lambda s: dict.fromkeys(s),
    "too much": lambda s: {
        "payload": Jsonb({"secret": _of(s) * 60000}),
        "error": _of(s) * 60000,
        "results": Jsonb([{"secret": _of(s) * 60000}]),
        "key": s["key"] * 100,
        "jobs": Jsonb([{"job_type": "t", "payload": {"secret": _of(s) * 60000}}]),
    },
    "another form": lambda s: {
        "payload": Jsonb(_of(s)),
        "results": Jsonb({"secret": _of(s)}),
        "jobs": Jsonb({"secret": _of(s)}),
        "error": "",
        "key": "",
    },
    "too many results": lambda s: {"results": Jsonb([_of(s)] * 3)},
}
# One job of several is wrong, each with a secret payload and key.
WRONG_JOBS: dict[str, Any] = {
    "priority": {"priority": "high"},
    "run_at": {"run_at": "soon"},
    "delay": {"delay": "-1"},
    "queue": {"queue": "no queue!"},
    "job_type": {"job_type": 5},
    "an unknown word": {"pay_load": 1},
    "depends_on": {"depends_on": [10**15]},
    "max_attempts": {"max_attempts": 10**9},
    "backoff": {"backoff": {"kind": "wild"}},
    "on_conflict": {"on_conflict": "shout"},
    "unique_for": {"unique_for": "for ever"},
    "updated_at": {"updated_at": "2026-01-01", "on_conflict": "keep"},
}

# Good secrets beside one argument that is refused.
BAD_CALLS = {
    **{
        f"enqueue, {name}": f"select rota.enqueue('t', %(payload)s, idempotency_key => %(key)s,"
        f" ordering_key => %(key)s, limit_key => %(key)s, {name} => {value})"
        for name, value in {
            "queue": "'no queue!'", "priority": "99999", "delay": "'-1'", "max_attempts": "0",
            "backoff": """'{"kind": "wild"}'""", "lease": "'0'", "on_conflict": "'shout'",
            "unique_for": "'-1'", "run_at": "'infinity'", "depends_on": "'{1000000000}'",
            "blocks": "1000000000", "if_parent_dead": "'weep'", "max_wait": "'1'",
            "skip_dead": "null",
        }.items()
    },
    **{
        f"schedule_job, {name}": f"select rota.schedule_job('n', {value})"
        for name, value in {
            "schedule": "'often', 't', %(payload)s",
            "time_zone": "'@daily', 't', %(payload)s, time_zone => 'Nowhere'",
            "overlap": "'@daily', 't', %(payload)s, overlap => 'x'",
            "job_type": "'@daily', '', %(payload)s",
        }.items()
    },
    "pipeline": "select rota.start_pipeline('nope', %(payload)s)",
    "stage": "select rota.start_pipeline('line', %(payload)s, 'z', idempotency_key => %(key)s)",
    "next_stage": "select rota.finish_job(%(job_id)s, %(token)s, %(payload)s, 'a')",
    "next_stages": "select rota.finish_jobs(%(job_ids)s, %(tokens)s, %(results)s, '{a,b}')",
    "retry_in": "select rota.fail_job(%(job_id)s, %(token)s, %(error)s, retry_in => '-1')",
    "error_type": "select rota.fail_job(%(job_id)s, %(token)s, %(error)s, repeat('x', 999))",
    "percent": "select rota.set_progress(%(job_id)s, %(token)s, 101, %(error)s)",
    "scope": "select rota.record_effect('no scope!', %(key)s, %(job_id)s, %(token)s)",
    "keep": "select rota.record_effect('s', %(key)s, %(job_id)s, %(token)s, keep => '-1')",
    "max_running": "select rota.set_limit(limit_key => %(key)s, max_running => -1)",
    "worker": "select rota.finish_and_claim('', %(job_ids)s, %(tokens)s, %(results)s)",
}  # fmt: skip


def mistaken(scene: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return arguments for the calls of good_calls.py, by what is wrong with them."""
    made = {name: {**scene, **change(scene)} for name, change in MISTAKES.items()}
    for name, wrong in WRONG_JOBS.items():
        good = {"job_type": "t", "payload": {"secret": _of(scene)}, "queue": "q"}
        good["idempotency_key"] = scene["key"] + name
        made[f"jobs: {name}"] = {**scene, "jobs": Jsonb([good, {**good, **wrong}])}
    return made


def _of(scene: Mapping[str, Any]) -> str:
    return str(scene["payload"].obj["secret"])
