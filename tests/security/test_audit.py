"""Each function by which only operators change something leaves a row of the audit."""

from __future__ import annotations

from typing import Any

import psycopg

from security.good_calls import CALLS, UNAVAILABLE, set_scene
from security.rights import CALLERS
from sql.helpers import rows, scalar

Db = psycopg.Connection[Any]

# What is no act of an operator: it does what is due, or prepares what begin_queue_move() does.
NO_ACTS = {"tick", "tick_loop", "sweep_stale_leases", "receive_plan"}
# So that there is something to change.
BEFORE = {
    "resume_type": "select rota.pause_type('t')",
    "resume_all": "select rota.pause_all()",
    "set_archive": "create schema history authorization rota_installer;"
    " select rota.set_archive('history')",
}


def test_each_act_of_an_operator_is_recorded(db: Db) -> None:
    scene = set_scene(db)
    volatile = {
        name
        for (name,) in rows(
            db,
            "select proname::text from pg_proc"
            " where pronamespace = 'rota'::regnamespace and provolatile = 'v'",
        )
    }
    acts = sorted(
        name
        for name in volatile & CALLERS.keys() - NO_ACTS - UNAVAILABLE.keys() - {"stop_ticker"}
        if "operator" in CALLERS[name] and "worker" not in CALLERS[name]
    )
    count = "select count(*) from rota.audit_log"
    silent = []
    for name in acts:
        with db.transaction(force_rollback=True):
            db.execute(BEFORE.get(name, "select 1"))
            before = scalar(db, count)
            db.execute(CALLS[name], scene)
            if scalar(db, count) == before:
                silent.append(name)

    assert len(acts) >= 30
    assert silent == []
