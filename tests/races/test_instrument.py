"""Pauses between the statements of functions: in the right places, and without effect."""

from __future__ import annotations

from races.instrument import add_pauses, find_readers, find_statements

BODY = """
declare
    v_now constant timestamptz := case when true then now() else null end;
begin
    -- if; then; loop
    if f.x = 'a;b' then
        perform 1;
    elsif case f.x when 'c' then true else false end then
        v := case when (select true) then 1 end;
    else
        for v_a, v_b in select 1, case when true then 2 end loop
            exit when found;
            raise exception using hint = 'x';
        end loop;
    end if;
    case f.x
        when 'd', 'e' then perform 2;
        else null;
    end case;
    loop
        begin
            insert into t values (1) on conflict do nothing;
        exception
            when no_data_found then
                raise;
        end;
    end loop;
end;
"""


def test_find_statements_finds_the_statements_and_nothing_else() -> None:
    found = [
        " | ".join(" ".join(BODY[begin:end].split()) for begin, end in parts)
        for parts in find_statements(BODY)
    ]

    assert found == [
        "if f.x = 'a;b' then | elsif case f.x when 'c' then true else false end then",
        "perform 1;",
        "v := case when (select true) then 1 end;",
        "for v_a, v_b in select 1, case when true then 2 end loop",
        "exit when found;",
        "raise exception using hint = 'x';",
        "case f.x when 'd', 'e' then",
        "perform 2;",
        "null;",
        "insert into t values (1) on conflict do nothing;",
        "raise;",
    ]


def test_add_pauses_stops_before_each_use_of_a_table() -> None:
    body = "begin x := 'y'; return exists (select 'z' from rota.jobs); end"

    paused = add_pauses("f", body, frozenset({"jobs"}))

    assert paused == (
        "begin x := 'y'; assert race.pause('f: return exists (select ''z'' from rota.jobs);'); "
        "return exists (select 'z' from rota.jobs); end"
    )


def test_find_readers_follows_the_snapshot_of_the_caller() -> None:
    reads = "begin return exists (select from rota.jobs); end"
    functions = (
        ("stable", reads, "", False),
        ("asks_it", "begin return rota.stable(); end", "", False),
        ("volatile", reads, "", True),
        ("asks_first", "declare v boolean := rota.asks_it(); begin null; end", "", True),
        ("reads_nothing", "begin return rota.volatile(); end", "", False),
    )

    readers = find_readers(frozenset({"jobs"}), functions)

    assert readers == {"jobs", "stable", "asks_it", "asks_first"}
