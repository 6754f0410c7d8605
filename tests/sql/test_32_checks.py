"""How bad arguments are refused, where many functions share the check."""

from __future__ import annotations

import pytest

from sql.helpers import Db, raises, refused, rows

LISTS = ("array[array['default']]", "array_fill('default'::text, '{1}', '{0}')")
TAKERS = (
    "claim_jobs('w', %s)",
    "report_worker('w', 'h', 1, '1.0', %s)",
    "wait_for_jobs(%s)",
    "stop_waiting(%s)",
    "ring_others(%s)",
    "next_due_in(%s)",
)


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("names", LISTS)
def test_check_names_refuses_what_is_no_plain_list(db: Db, names: str, taker: str) -> None:
    with refused("queues"):
        rows(db, "select * from rota." + taker % names)


def test_check_job_refs_speaks_of_the_lists_it_was_given(db: Db) -> None:
    with raises("22023", "kept_lease_tokens must be as many as kept_job_ids"):
        rows(db, "select * from rota.finish_and_claim('w', kept_job_ids => '{1}')")
    with raises("22023", "kept_job_ids and kept_lease_tokens must be"):
        rows(db, "select * from rota.finish_and_claim('w', kept_job_ids => '{{1}}')")


def test_check_time_zone_is_soon_done_with_a_long_text(db: Db) -> None:
    db.execute("set plan_cache_mode = force_generic_plan")
    db.execute("set statement_timeout = '3s'")

    with refused("time_zone"):
        rows(db, "select rota.next_run('@daily', repeat('x', 20000000))")
