"""How bad arguments are refused, where many functions share the check."""

from __future__ import annotations

import pytest

from sql.helpers import Db, call, enqueue, one, owner, raises, refused, rows, running

LISTS = ("array[array['default']]", "array_fill('default'::text, '{1}', '{0}')")
TAKERS = (
    "claim_jobs('w', %s)",
    "report_worker('w', 'h', 1, '1.0', %s)",
    "wait_for_jobs(%s)",
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


def test_check_interval_counts_the_days_of_a_year(db: Db) -> None:
    """PostgreSQL takes 361 days for more than a year."""
    job = running(db)
    call(db, "set_queue", queue="q", keep_finished="36525 days", keep_dead="36525 days")
    enqueue(db, delay="36525 days")
    with refused("retry_in"):
        one(db, "fail_job", **owner(job), error="e", retry_in="365 days 6 hours 1 second")
    with refused("delay"):
        enqueue(db, delay="36526 days")

    assert one(db, "fail_job", **owner(job), error="e", retry_in="365 days").status == "failed"


def test_check_time_zone_is_soon_done_with_a_long_text(db: Db) -> None:
    db.execute("set plan_cache_mode = force_generic_plan")
    db.execute("set statement_timeout = '3s'")

    with refused("time_zone"):
        rows(db, "select rota.next_run('@daily', repeat('x', 20000000))")


@pytest.mark.parametrize(
    "element",
    ["0", "1", "-1", "0.5", "9999", '""', '"a"', "[]", "{}", "[1]", "[[0]]", '{"": 1}', "null"],
)
def test_no_json_is_four_times_as_long_in_binary_form(read_only_db: Db, element: str) -> None:
    query = """
        select pg_column_size(jsonb_agg(%(element)s::jsonb)) as binary_form,
            octet_length(jsonb_agg(%(element)s::jsonb)::text) as text_form
        from generate_series(1, 100000)
    """
    ((binary_form, text_form),) = read_only_db.execute(query, {"element": element}).fetchall()

    assert binary_form <= 4 * text_form + 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "told"),
    [(100_000, None), (200_000, "got 1488895"), (900_000, "got 14 MB in binary")],
)
def test_check_size_refuses_what_is_over_a_mebibyte_of_text(
    read_only_db: Db, count: int, told: str | None
) -> None:
    query = (
        "select rota._check_size('result', jsonb_agg(n), '') from generate_series(1, %s) as n"
    )

    if told is None:
        rows(read_only_db, query, count)
    else:
        with raises("22023", "result must be at most 1 MiB, " + told):
            rows(read_only_db, query, count)
