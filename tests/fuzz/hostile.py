"""Values that callers should not send, as expressions of SQL, by the types of arguments.

Expressions are text, so that what was called can be printed as it was called.
"""

from __future__ import annotations

WIDE = 1_000_000  # characters from which an expression may take longer


def quoted(text: str, kind: str = "text") -> str:
    return "'" + text.replace("'", "''") + f"'::{kind}"


def repeated(text: str, times: int) -> str:
    return f"repeat({quoted(text)}, {times})"


TEXTS = [
    "null::text",
    *map(
        quoted,
        (
            *("", " ", "x", " x", "x ", "x y", "*", "a:*", "end", "default", "keep", "NULL"),
            *("'", '"', "\\", "\\'", "%", "%s %n %1$s", "$1", "$$", "{}", "{a,b}", "a;--", "|"),
            *("-1", "0", "1e400", "infinity", "NaN", "\n", "a\nb", "\t", "\x01", "\x7f"),
            *("\x85", "\xa0", "\u2028", "\ufeff", "\ufffd", "\uffff", "e\u0301", "\u202eabc"),
            *("שלום", "😀", "İ", "ß", "\u0301", "../../etc/passwd", "a|b", "a:b", ".", "-x"),
        ),
    ),
    *(repeated("x", length) for length in (62, 63, 64, 255, 256, 10000, 10001, 20001)),
    *(repeated("é", length) for length in (31, 32, 63, 64, 127, 128, 255, 256)),
    *(repeated("😀", length) for length in (15, 16, 63, 64, 255, 256)),
    repeated("\\", 255),
    repeated("x", WIDE),
]
SCHEDULES = [
    *map(
        quoted,
        (
            *("* * * * *", "0 2 * * *", "@daily", "every 90 seconds", "after 10 minutes", "@"),
            *("0 0 31 2 *", "0 0 29 2 *", "0 0 29 2 1#5", "59 59 23 31 12 7", "* * * * * *"),
            *("every 0 seconds", "every 1 second", "every 3155760000 seconds", "after hour"),
            *("every 3155760001 seconds", "every 99999999999999999999 weeks", "0 0 L * *"),
            *("0 0 LW * 5L", "*/1 */1 */1 */1 */1", "5-1 * * * *", "60 * * * *", "0 0 1 1"),
            "every -1 seconds",
        ),
    ),
    repeated("1,", 127),
    repeated("* ", 128),
]
ZONES = [
    quoted(zone)
    for zone in (
        *("UTC", "Europe/Warsaw", "America/Sao_Paulo", "Pacific/Apia", "Asia/Kathmandu", "CET"),
        *("Etc/GMT-1", "Etc/GMT+12", "+01", "-25", "europe/warsaw", "Europe/Warsaw "),
        *(
            "EST5EDT",
            "posixrules",
            "localtime",
            "Factory",
            "<+03>-3",
            "right/UTC",
            "Antarctica/Troll",
        ),
    )
]
INTEGERS = [
    f"({number})::integer"
    for number in (
        *("null", 0, 1, -1, 2, 10, 100, 255, 1000, 1001, 10000, 10001, 1000000, 1000001),
        *(32767, 32768, -32768, -32769, 2147483647, -2147483648),
    )
]
BIGINTS = [
    f"({number})::bigint"
    for number in ("null", 0, 1, -1, 9999999, 2**31, 2**53, 2**63 - 1, 2 - 2**63, -(2**63))
]
FLOATS = [
    f"'{number}'::double precision"
    for number in (
        *("NaN", "Infinity", "-Infinity", "0", "-0.0", "100", "100.0000001", "-0.0000001"),
        *("99.995", "99.994999", "1e308", "-1e308", "1e-307", "4e-320", "50"),
    )
] + ["null::double precision"]
INTERVALS = [
    quoted(text, "interval")
    for text in (
        *("0", "-0", "1 us", "-1 us", "999 us", "1 ms", "1 second", "999999 us", "1 minute"),
        *(
            "1 day",
            "1 day 1 us",
            "30 days",
            "30 days 1 us",
            "366 days",
            "100 years",
            "101 years",
        ),
        *("1 month -30 days", "1 year -360 days", "1 day -24 hours", "-1 day 25 hours"),
        *("178000000 years", "-178000000 years", "178956970 years 7 mons", "2147483647 days"),
        *("-2147483648 days", "2147483647 mons -2147483648 days", "2562047788 hours"),
        *("2562047788:00:54.775807", "-2562047788:00:54.775807", "60 seconds", "1.5 seconds"),
        *("178956970 years 7 mons 2147483647 days 2562047788:00:54.775807", "infinity"),
        *("-infinity", "1 month", "35999 days", "4000 years", "290000 years"),
    )
] + ["null::interval"]
MOMENTS = [
    quoted(text, "timestamptz")
    for text in (
        *(
            "infinity",
            "-infinity",
            "epoch",
            "1969-12-31 23:59:59.999999+00",
            "1970-01-01 00:00+00",
        ),
        *(
            "4714-11-24 00:00+00 BC",
            "294276-12-31 23:59:59.999999+00",
            "9998-12-31 23:59:59+00",
        ),
        *("9999-01-01 00:00+00", "9999-01-01 00:00:00.000001+00", "10000-01-01 00:00+00"),
        *("2026-01-12 10:00+00", "2026-01-12 09:59:59.999999+00", "2026-03-29 01:30+00"),
        *("2026-10-25 00:30+00", "0001-01-01 00:00+00", "1800-01-01 00:00+00", "2100-02-28"),
    )
] + ["null::timestamptz"]
BOOLEANS = ["null::boolean", "true", "false"]
# What the reader of json itself refuses is here too, and left out by `vetted`.
JSONS = [
    "null::jsonb",
    *(
        quoted(text, "jsonb")
        for text in (
            *(
                "null",
                "{}",
                "[]",
                "[{}]",
                "[null]",
                "[[]]",
                "true",
                "0",
                "-0",
                "1e400",
                "1e-400",
            ),
            *(
                "1e131071",
                '""',
                '"x"',
                '"\\u0000"',
                '"\\ud800"',
                '{"a": "\\udfff"}',
                '"\\u0085"',
            ),
            *(
                '{"": ""}',
                '{"a": {"b": {}}}',
                '{"\\ufffd": 1}',
                "[1, 1]",
                "NaN",
                '{"a":1,"a":2}',
            ),
            *("99999999999999999999999999", '"😀"', '[["a", 1]]', '{"kind": "fixed"}'),
        )
    ),
    *(
        f"(repeat('{opened}', {depth}) || '1' || repeat('{closed}', {depth}))::jsonb"
        for depth in (1000, 10000)
        for opened, closed in (("[", "]"), ('{"a":', "}"))
    ),
]
BIG_JSONS = [
    "to_jsonb(repeat('x', 10000000))",
    "jsonb_build_object('a', repeat('x', 10000000))",
    "jsonb_build_object('a', repeat('é', 524280))",
    "jsonb_build_object('a', repeat('x', 1048567))",  # a byte too many
    "jsonb_build_object('a', repeat('x', 1048566))",
    "(select jsonb_agg(n) from generate_series(1, 1000000) as n)",
    "(select jsonb_object_agg(n, null) from generate_series(1, 500000) as n)",
]
BIG = {"jsonb": BIG_JSONS, "text": ["repeat('x', 10000000)", "repeat('😀', 2500000)"]}
# Members of objects, as JSON texts.
ATOMS = [
    *("null", "true", "false", "0", "-0", "1", "-1", "1.5", "1e400", "-1e400", "1e-400", "[]"),
    *(
        "{}",
        "[null]",
        "[[1]]",
        '{"a": 1}',
        "32767",
        "32768",
        "-32769",
        "2147483648",
        "1e131071",
    ),
    *("9223372036854775807", "9223372036854775808", "1e18", "1e19", "0.0005", "3155760001"),
    *('""', '" "', '"x"', '"1"', '" 1"', '"1e3"', '"-1"', '"NaN"', '"infinity"', '"-infinity"'),
    *('"true"', '"maybe"', '"now"', '"tomorrow"', '"2026-01-12"', '"2026-01-12T10:00:00Z"'),
    *('"294277-01-01"', '"4715-01-01 BC"', '"5 minutes"', '"178000000 years"', '"1 fortnight"'),
    *('"P1D"', '"1 day ago"', '"@ 1 minute"', '"9999999999999 hours"', '"\\\\"', '"%"', '"$1"'),
    *('"\\u0085"', '"\\ufffd"', '"😀"', '"{1,2}"', '"[1]"', '"allballs"', '"1,5"', '"0x10"'),
    *(
        '"2026-13-45"',
        '"1:2:3:4"',
        '"10:00"',
        '"yesterday"',
        '"epoch"',
        '"1_000"',
        '"00:00:01"',
    ),
    f'"{"x" * 63}"',
    f'"{"x" * 64}"',
    f'"{"x" * 256}"',
    f'"{"é" * 128}"',
    "[" * 500 + "]" * 500,
    "9" * 400,
    f"[{', '.join(['1'] * 10001)}]",
]
BY_TYPE = {
    "text": TEXTS,
    "name": [
        quoted(text, "name")
        for text in (
            "",
            "postgres",
            "nobody",
            "pg_monitor",
            'a"b',
            "a'b",
            "é" * 31,
            "x" * 63,
            "%",
        )
    ]
    + ["null::name"],
    "integer": INTEGERS,
    "smallint": INTEGERS,
    "bigint": BIGINTS,
    "double precision": FLOATS,
    "interval": INTERVALS,
    "timestamp with time zone": MOMENTS,
    "boolean": BOOLEANS,
    "jsonb": JSONS,
}


def arrays(kind: str, plain: str, null: str) -> list[str]:
    """Return what is wrong with lists whatever they hold."""
    return [
        f"null::{kind}[]",
        f"'{{}}'::{kind}[]",
        f"array[{null}]",
        f"array[{plain}, {null}]",
        f"array[{plain}, {plain}]",
        f"array[array[{plain}], array[{plain}]]",
        f"array[array[array[{plain}]]]",
        f"array_fill({plain}, '{{2}}', '{{0}}')",
        f"array_fill({plain}, '{{2}}', '{{-2147483648}}')",
        f"array_fill({plain}, '{{1}}', '{{2}}')",
        f"array_fill({plain}, '{{1000}}')",
        f"array_fill({plain}, '{{1001}}')",
        f"array_fill({null}, '{{1000}}')",
        f"array_fill({plain}, '{{100000}}')",
        f"array(select n::{kind} from generate_series(1, 100000) as n)",
        f"array(select n::{kind} from generate_series(1, 10000) as n)",
    ]


BY_TYPE["text[]"] = arrays("text", "'default'::text", "null::text") + [
    f"array[{text}]" for text in TEXTS
]
BY_TYPE["timestamp with time zone[]"] = [
    *("null::timestamptz[]", "'{}'::timestamptz[]", "array[null::timestamptz]"),
    *(
        "array[rota.now(), null]",
        "array[array[rota.now()]]",
        "array_fill(rota.now(), '{1001}')",
    ),
    *(f"array[{moment}]" for moment in MOMENTS),
]
BY_TYPE["bigint[]"] = arrays("bigint", "3::bigint", "null::bigint") + [
    f"array[{number}]" for number in BIGINTS
]
HOSTILE = {"schedule": SCHEDULES, "time_zone": ZONES}
ODD_KEYS = ('""', '"x"', '"JOB_TYPE"', '"job_type "', '"%"', '"\\ufffd"', f'"{"k" * 300}"')
