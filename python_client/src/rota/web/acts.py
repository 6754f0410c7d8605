"""What an operator can do from the page: stored functions, and nothing else.

A GET of an act's address shows what it would do and the SQL, and the form there does it:
nothing acts on GET.  Of several jobs each is changed in a transaction of its own: the page
lists those that it could not change, with the reason, and changes the others.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from urllib.parse import parse_qsl, urlencode

import psycopg
from psycopg import sql
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ..client.connecting import one_line
from ..client.listing import listed
from . import queries
from .access import RefusedError
from .database import Row, TooSlowError, UnreachableError
from .filters import (
    BadFilterError,
    Filter,
    acted,
    asked_of,
    check_masked,
    json_object,
    json_text,
)
from .queries import statement, told
from .show import WORDS, schedule_path
from .site import Answer, Site, site_of
from .undo import MAX_ROWS, Undo, numbers, undo_of

MAX_BODY = 2 << 20
MAX_SELECTED = 1000
MAX_TOLD = 100
STEP_TIME, FIRST_TIME = 1.0, 0.02
"""Seconds of each step of an act, and of counting until its page is shown."""
COUNTED_WITH = {
    "set_priority": '{"priority": 0}',
    "move": '{"queue": "default"}',
    "reschedule": '{"delay": "0"}',
}
SAMPLES = 20
STEP_ROWS = 5


@dataclass(frozen=True)
class Field:
    """An argument that the operator may give."""

    name: str
    kind: str = "text"
    choices: tuple[str, ...] = ()
    is_needed: bool = False


@dataclass(frozen=True)
class Act:
    """A stored function: what it is about, and what else it takes.

    One that *looks* begins with what there is, and shows what would come before it is done.
    """

    function: str
    about: tuple[str, ...]
    fields: tuple[Field, ...] = ()
    is_danger: bool = False
    is_final: bool = False
    looks: bool = False


JOB = ("job_id",)
_ACTS = (
    Act("retry_job", JOB, (Field("force", "flag"),)),
    Act("retry_with_dependants", JOB, (Field("force", "flag"),)),
    Act("cancel_job", JOB, (Field("reason"),), is_danger=True),
    Act("reschedule_job", JOB, (Field("delay"), Field("run_at"))),
    Act("set_priority", JOB, (Field("priority", "number", is_needed=True),)),
    Act("pause_queue", ("queue",), (Field("reason"), Field("until"))),
    Act("resume_queue", ("queue",)),
    Act("pause_type", ("job_type",), (Field("queue"), Field("reason"), Field("until"))),
    Act("resume_type", ("job_type",), (Field("queue"),)),
    Act("pause_all", (), (Field("reason"), Field("until")), is_danger=True),
    Act("resume_all", ()),
    Act(
        "schedule_job",
        ("name",),
        (
            Field("schedule", is_needed=True),
            Field("time_zone"),
            Field("job_type", is_needed=True),
            Field("queue"),
            Field("payload", "json"),
            Field("priority", "number"),
            Field("max_attempts", "number"),
            Field("lease"),
            Field("time_limit"),
            Field("headers", "json"),
            Field("backoff", "json"),
            Field("overlap", "choice", ("allow", "skip", "queue")),
            Field("catch_up", "choice", ("one", "all", "skip")),
            Field("catch_up_window"),
            Field("catch_up_max", "number"),
            Field("jitter"),
            Field("starts_at"),
            Field("ends_at"),
            Field("source"),
        ),
        looks=True,
    ),
    Act("run_schedule_now", ("name",)),
    Act("disable_schedule", ("name",)),
    Act("enable_schedule", ("name",)),
    Act("unschedule_job", ("name",), is_danger=True),
    Act("resume_ordering_key", ("ordering_key",), is_danger=True, is_final=True),
    Act(
        "settle_effect",
        ("scope", "key"),
        (
            Field("outcome", "choice", ("done", "again"), is_needed=True),
            Field("result", "json"),
        ),
        is_danger=True,
        is_final=True,
    ),
    Act(
        "set_limit",
        (),
        (
            Field("queue"),
            Field("job_type"),
            Field("limit_key"),
            Field("max_running", "number"),
            Field("max_starts", "number"),
            Field("per"),
            Field("burst", "number"),
            Field("weight", "number"),
            Field("reset", "flag"),
        ),
    ),
    Act("tick", ()),
    Act("sweep_stale_leases", ()),
)
ACTS = {act.function: act for act in _ACTS}


@dataclass
class Call:
    """An act with its arguments, ready to be shown and done."""

    act: Act
    about: list[dict[str, Any]]
    more: dict[str, Any] = field(default_factory=dict)

    def statements(self) -> list[sql.Composed]:
        """Return the statement for each of what it is about."""
        return [statement(self.act.function, {**one, **self.more}) for one in self.about]


_EFFECTS = re.compile(r"select \* from rota\.unknown_effects\b")
_ACTS_ON_JOBS = re.compile(
    r"\brota\.act_on_jobs\(\s*'(\w+)'\s*,\s*(E?)'((?:[^']|'')*)'"
    r"(?:\s*,\s*(E?)'((?:[^']|'')*)')?\s*(?:,\s*after_id\s*=>\s*v_after_id\s*)?\)"
)
_CALL = re.compile(r"select (?:\* from )?rota\.(\w+)\((.*)\);?", re.S)
_ARGUMENT = re.compile(r"\s*(?:(\w+)\s*=>\s*)?(?:'((?:[^']|'')*)'|(-?\d+))\s*(?:,|$)")


def address_of(remedy: str | None) -> str | None:
    """Return where a remedy can be done on this page, if it is one of the acts."""
    if remedy is None:
        return None
    if _EFFECTS.match(remedy):
        return "/waiting#effects"
    if (acts := _ACTS_ON_JOBS.search(remedy)) is not None:
        rest = remedy[: acts.start()] + remedy[acts.end() :]
        return None if "rota." in rest else _address_of_all(acts)
    match = _CALL.fullmatch(remedy.strip())
    if match is not None and match[1] == "explain_job" and match[2].isdecimal():
        return f"/jobs/{match[2]}"
    act = ACTS.get(match[1]) if match else None
    if match is None or act is None:
        return None
    names = [*act.about, *(f.name for f in act.fields)]
    given: list[tuple[str, str]] = []
    at = 0
    text = match[2]
    while at < len(text):
        found = _ARGUMENT.match(text, at)
        if found is None or found.end() == at:
            return None
        name = found[1] or (names[len(given)] if len(given) < len(names) else "")
        if name not in names:
            return None
        given.append((name, found[2].replace("''", "'") if found[3] is None else found[3]))
        at = found.end()
    return f"/act/{act.function}?{urlencode(given)}"


def _address_of_all(match: re.Match[str]) -> str | None:
    """Return where an act on all jobs of a filter can be done, if the page knows its words."""
    act, wanted, given = match[1], _unquoted(match[2], match[3]), _unquoted(match[4], match[5])
    known = {field.name: field for field in BULK.get(act, ())}
    try:
        pairs = asked_of(wanted)
        arguments = json.loads(given or "{}")
    except BadFilterError:
        return None
    if act not in BULK or not set(arguments) <= set(known):
        return None
    for name, value in arguments.items():
        is_text = known[name].kind != "json" and isinstance(value, str)
        pairs.append((f"to.{name}", value if is_text else json.dumps(value)))
    return f"/all/{act}?{urlencode(pairs)}"


def _unquoted(escapes: str | None, text: str | None) -> str:
    """Return what a literal of SQL stands for."""
    found = (text or "").replace("''", "'")
    return found.replace("\\\\", "\\") if escapes else found


Pairs = list[tuple[str, str]]


def form(
    answer: Callable[[Request, Site, Pairs], Awaitable[tuple[Response, bool]]],
) -> Callable[[Request], Awaitable[Response]]:
    """Make a screen of a function that tells whether the act is over, for who may act.

    Who has acted is sent on to the answer, so that to load it again does not do it again.
    """

    @wraps(answer)
    async def found(request: Request) -> Response:
        site = site_of(request)
        if not await site.may_act(request):
            raise HTTPException(403, WORDS["read_only_text"])
        if request.method == "POST":
            told, is_over = await answer(request, site, await _checked_form(request))
            key = site.results.keep(request.state.user, told) if is_over else None
            return RedirectResponse(f"{request.url.path}?result={key}", 303) if key else told
        if (key := request.query_params.get("result")) is None:
            return (await answer(request, site, request.query_params.multi_items()))[0]
        if (kept := site.results.get(key, request.state.user)) is None:
            raise HTTPException(404, WORDS["result_gone"])
        return kept

    return found


@form
async def act(request: Request, site: Site, pairs: Pairs) -> tuple[Response, bool]:
    """Show what an act would do; when its form is sent, do it."""
    wanted = ACTS.get(str(request.path_params["function"]))
    if wanted is None:
        raise HTTPException(404)
    is_look = wanted.looks and any(name == "look" for name, _ in pairs)
    if wanted.looks and request.method != "POST":
        pairs = await _as_it_is(site, pairs)
    call, problem = _call(wanted, pairs)
    upcoming = Answer()
    if wanted.looks:
        problem = await _changed(site, dict(pairs)) or problem
        upcoming = await _upcoming(site, call.more)
        problem = problem or upcoming.problem
    done: list[Row] = []
    failed: list[tuple[dict[str, Any], str]] = []
    rows: list[int] = []
    is_done = request.method == "POST" and not is_look and problem is None
    if is_done:
        last = await _last_of_audit(site)
        done, failed, rows = await _do(site, request, call, last)
    jobs = Answer()
    if wanted.about == JOB and call.about:
        ids = {"ids": [one["job_id"] for one in call.about[:SAMPLES]], "limit": SAMPLES}
        jobs = await site.ask(listed(["ids"]), ids)
    answer = await site.render(
        request,
        "act.html",
        200 if problem is None or request.method != "POST" else 422,
        act=wanted,
        call=call,
        values=dict(pairs),
        problem=problem,
        is_done=is_done,
        upcoming=upcoming.rows,
        done=done,
        failed=failed,
        jobs=jobs.rows,
        jobs_problem=jobs.problem,
        statements=[told(one) for one in call.statements()[:SAMPLES]],
        undo=await _undo(site, rows),
        is_much=len(rows) > MAX_ROWS,
        back=_back(wanted, call),
    )
    return answer, is_done


async def _as_it_is(site: Site, pairs: Pairs) -> Pairs:
    """Return what is asked for, with the rest as the schedule has it now."""
    given = dict(pairs)
    found = await _schedule(site, given)
    if not found.rows:
        raise HTTPException(
            503 if found.problem else 404, found.problem or WORDS["act_nothing"]
        )
    row = found.rows[0]
    given["was"] = _mark(row)
    for name in ("payload", "headers"):
        if row[name] is not None and (shown := site.json.editable(row[name])) is None:
            raise HTTPException(403, WORDS["not_editable"])
        row[name] = shown if row[name] is not None else None
    return [(name, str(value)) for name, value in {**row, **given}.items() if value is not None]


async def _changed(site: Site, given: Mapping[str, str]) -> str | None:
    """Say so if a schedule is not any more as the form has had it: it sends all of it."""
    if "was" not in given:
        return None
    found = await _schedule(site, given)
    if found.problem or (found.rows and _mark(found.rows[0]) == given["was"]):
        return found.problem
    return WORDS["schedule_changed"]


async def _schedule(site: Site, given: Mapping[str, str]) -> Answer:
    return await site.ask(queries.SCHEDULE_AS_GIVEN, {"name": given.get("name", "")[:63]})


def _mark(row: Row) -> str:
    return hashlib.sha256(repr(sorted(row.items())).encode()).hexdigest()[:16]


async def _upcoming(site: Site, given: Mapping[str, Any]) -> Answer:
    """Return the next times of a schedule that is not stored yet, or what is wrong with it."""
    try:
        return await site.ask(
            queries.WOULD_COME,
            {"schedule": given.get("schedule"), "time_zone": given.get("time_zone", "UTC")},
        )
    except psycopg.DatabaseError as error:
        return Answer(problem=one_line(error))


def _call(act: Act, pairs: Sequence[tuple[str, str]]) -> tuple[Call, str | None]:
    """Return what is asked for, and what is missing or wrong in it."""
    values = dict(pairs)
    about: list[dict[str, Any]] = [{}]
    problem = None
    try:
        if act.about == JOB:
            ids = dict.fromkeys(_integer(v) for n, v in pairs if n in ("job_id", "id"))
            about = [{"job_id": job_id} for job_id in list(ids)[:MAX_SELECTED]]
        elif act.about:
            about = [{name: values[name] for name in act.about}]
        if not about:
            problem = WORDS["act_nothing"]
    except (KeyError, ValueError):
        raise HTTPException(404, WORDS["act_nothing"]) from None
    more, wrong = _given(act.fields, values)
    return Call(act, about, more), wrong or problem


def _given(
    fields: Sequence[Field], values: Mapping[str, str], *, is_all_needed: bool = True
) -> tuple[dict[str, Any], str | None]:
    """Return what was written in the fields, JSON as its text, and what is wrong with it."""
    given: dict[str, Any] = {}
    problem = None
    for one in fields:
        text = values.get(one.name, "").strip()
        needs = WORDS["act_needs"].format(WORDS.get(f"arg_{one.name}", one.name))
        try:
            if not text:
                problem = needs if one.is_needed and is_all_needed else problem
            elif one.kind == "choice" and text not in one.choices:
                problem = needs
            elif one.kind == "flag":
                given[one.name] = True
            elif one.kind == "number":
                given[one.name] = _integer(text)
            else:
                given[one.name] = json_text(text) if one.kind == "json" else text
        except BadFilterError as error:
            problem = str(error)
        except ValueError:
            problem = WORDS["act_number"].format(text)
    return given, problem


async def _do(
    site: Site, request: Request, call: Call, last: int | None
) -> tuple[list[Row], list[tuple[dict[str, Any], str]], list[int]]:
    """Do it; return what came back, what was refused and why, and its rows of the audit."""
    done: list[Row] = []
    failed: list[tuple[dict[str, Any], str]] = []
    rows: list[int] = []
    for about, each in zip(call.about, call.statements(), strict=True):
        try:
            returned, left = await _sent(site, request, each, last)
            done += returned
            rows += left
        except UnreachableError as error:
            rest = call.about[call.about.index(about) :]  # to wait for each could take an hour
            failed += [(one, _refusal(error)) for one in rest]
            break
        except (psycopg.DatabaseError, TooSlowError) as error:
            failed.append((about, _refusal(error)))
    return done, failed, rows


async def _sent(
    site: Site, request: Request, call: sql.Composed, last: int | None = None
) -> tuple[list[Row], list[int]]:
    """Return what a call returned, and its rows of the audit, if the *last* before is known."""
    async with site.database.acting(request.state.user.name) as connection:
        returned = await (await connection.execute(call)).fetchall()
        if last is None:
            return returned, []
        found = await connection.execute(queries.AUDIT_OF_ACT, {"since": last})
        return returned, [row["id"] for row in await found.fetchall()]


def _refusal(error: psycopg.DatabaseError | TooSlowError | UnreachableError) -> str:
    """Return why the database has not done an act, and what helps."""
    if isinstance(error, TooSlowError):
        return WORDS["act_slow"]
    if isinstance(error, UnreachableError):
        return WORDS["act_unknown"]
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return WORDS["act_locked"]
    hint = error.diag.message_hint
    if hint is None and isinstance(error, psycopg.errors.InsufficientPrivilege):
        hint = WORDS["grant_needed"]
    return one_line(error) + (f" ({hint})" if hint else "")


@dataclass
class Progress:
    """How far an act on all that match has come."""

    matched: int = 0
    changed: int = 0
    failed: int = 0
    dependants: int = 0
    after_id: int | None = 0
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Those of the audit that it has left."""

    def add(self, row: Row) -> None:
        """Add what one call has done."""
        self.matched += row["matched"]
        self.changed += row["changed"]
        self.failed += len(row["conflicts"])
        self.dependants += row["dependants"]
        self.conflicts = (self.conflicts + row["conflicts"])[:MAX_TOLD]
        self.samples = (self.samples + row["samples"])[:SAMPLES]
        self.after_id = row["next_after_id"]


BULK: dict[str, tuple[Field, ...]] = {
    "retry": (
        Field("merge", "json"),
        Field("payload", "json"),
        Field("max_attempts", "number"),
        Field("force", "flag"),
        Field("spread"),
        Field("keep_run_at", "flag"),
        Field("with_dependants", "flag"),
    ),
    "cancel": (Field("reason"),),
    "discard": (),
    "reschedule": (Field("delay"), Field("run_at"), Field("spread")),
    "set_priority": (Field("priority", "number", is_needed=True),),
    "move": (Field("queue", is_needed=True),),
    "purge": (),
}
# Which acts an operator would want for jobs of a status.
WANTED = {
    "queued": ("cancel", "reschedule", "set_priority", "move", "retry"),
    "running": ("cancel",),
    "failed": ("retry", "cancel", "reschedule", "move"),
    "blocked": ("cancel", "set_priority", "move"),
    "dead": ("retry", "discard", "purge"),
    "succeeded": ("purge", "retry"),
    "cancelled": ("retry", "purge"),
}
DANGERS = ("cancel", "purge")


@form
async def act_on_all(request: Request, site: Site, pairs: Pairs) -> tuple[Response, bool]:
    """Show to how many jobs an act would be done; do it in steps, each of which is a page."""
    name = str(request.path_params["act"])
    if name not in BULK:
        raise HTTPException(404)
    wanted = Filter.of(pairs)
    # What an act takes has names of its own beside those of the filter.
    values = {n.removeprefix("to."): v.strip() for n, v in pairs if n.startswith("to.")}
    arguments, problem = _arguments(BULK[name], values)
    asked = "{}"
    try:
        check_masked(site.json, wanted)
        asked = acted(wanted)
    except BadFilterError as error:
        problem = str(error)
    if not wanted.values:
        problem = WORDS["act_nothing"]
    is_step = request.method == "POST" and problem is None
    is_counting = request.method == "GET" and "after_id" in request.query_params
    progress = _so_far(pairs) if is_step or is_counting else Progress()
    if problem is None:
        last = await _last_of_audit(site) if is_step else None
        seconds = STEP_TIME if is_step or is_counting else FIRST_TIME
        call = (name, asked, arguments)
        problem = await _run(site, request, progress, call, seconds, last, is_step=is_step)
    is_over = is_step and progress.after_id is None and problem is None
    total = _number(pairs, "total") or progress.matched
    fields = BULK[name]
    if name == "retry" and asked != "{}" and len(wanted.values.get("id", ())) == 1:
        if "payload" not in values and not is_step:
            values |= await _payload(site, wanted)
        if "payload" in values:
            fields = fields[1:]  # the whole payload is there to be edited
    answer = await site.render(
        request,
        "bulk.html",
        422 if problem and request.method == "POST" else 200,
        act=name,
        fields=fields,
        is_danger=name in DANGERS,
        wanted=wanted,
        values=values,
        problem=problem,
        progress=progress,
        so_far=json.dumps(progress.conflicts),
        total=total,
        is_step=is_step,
        is_sent=request.method == "POST",
        is_over=is_over,
        undo=await _undo(site, progress.rows) if is_over else None,
        is_much=is_over and len(progress.rows) > MAX_ROWS,
        sql=_bulk_sql(name, asked, arguments, is_one="id" in wanted.values),
        counts_on=_counts_on(wanted, values, progress) if problem is None else None,
    )
    return answer, is_over


def _counts_on(wanted: Filter, values: Mapping[str, str], progress: Progress) -> str | None:
    """Return the parameters of an address that counts on, if not all is counted."""
    if progress.after_id is None:
        return None
    given = {f"to.{name}": value for name, value in values.items()}
    return wanted.address(**given, after_id=progress.after_id, matched=progress.matched)


async def _payload(site: Site, wanted: Filter) -> dict[str, str]:
    """Return the payload of the one job that is wanted, where it may be seen whole."""
    found = await site.ask(queries.JOB, {"id": int(wanted.get("id"))})
    text = site.json.editable(found.rows[0]["payload"]) if found.rows else None
    return {} if text is None else {"payload": text}


def _arguments(fields: Sequence[Field], values: dict[str, str]) -> tuple[str, str | None]:
    """Return what an act takes, as JSON, and what is wrong with it."""
    given, problem = _given(fields, values, is_all_needed=False)
    are_json = [one.name for one in fields if one.kind == "json"]
    texts = {n: value if n in are_json else json.dumps(value) for n, value in given.items()}
    return json_object(texts), problem


def _bulk(act: str, asked: str, arguments: str, **more: Any) -> sql.Composed:
    given = {} if arguments == "{}" else {"arguments": arguments}
    return statement("act_on_jobs", {"act": act, "filter": asked, **given, **more})


LOOP = """\
do {tag}
declare
    next bigint := 0;
begin
    while next is not null loop
        select a.next_after_id into next from {call}, after_id => next) as a;
        commit;
    end loop;
end;
{tag};"""


def _bulk_sql(act: str, asked: str, arguments: str, *, is_one: bool) -> str:
    """Return what does the same by hand, in steps where more than some jobs are looked at."""
    call = _bulk(act, asked, arguments)
    if is_one:
        return told(call)
    text = call.as_string(None).removeprefix("select * from ").removesuffix(")")
    tags = ("$$", *(f"$act{number}$" for number in range(len(text))))
    return LOOP.format(tag=next(tag for tag in tags if tag not in text), call=text)


async def _run(
    site: Site,
    request: Request,
    progress: Progress,
    asked_for: tuple[str, str, str],
    seconds: float,
    last: int | None,
    *,
    is_step: bool,
) -> str | None:
    """Call until all is done, or for as long as a page may take; return what went wrong."""
    until = time.monotonic() + seconds
    act, asked, arguments = asked_for
    if not is_step and arguments == "{}":
        # Only counted yet: what it takes is still to be said.
        arguments = COUNTED_WITH.get(act, arguments)
    try:
        while progress.after_id is not None and time.monotonic() < until:
            more = {"after_id": progress.after_id, "dry_run": not is_step}
            call = _bulk(act, asked, arguments, **more)
            (found,), left = await _sent(site, request, call, last)
            progress.add(found)
            progress.rows += left
    except (psycopg.DatabaseError, TooSlowError, UnreachableError) as error:
        return _refusal(error)
    return None


def _so_far(pairs: Sequence[tuple[str, str]]) -> Progress:
    """Return what the steps before this one have done."""
    told = next((value for name, value in pairs if name == "conflicts"), "[]")
    try:
        conflicts = [one for one in json.loads(told) if isinstance(one, dict)][:MAX_TOLD]
    except (ValueError, TypeError, RecursionError):
        conflicts = []
    return Progress(
        matched=_number(pairs, "matched"),
        changed=_number(pairs, "changed"),
        failed=_number(pairs, "failed"),
        after_id=_number(pairs, "after_id"),
        conflicts=conflicts,
        rows=numbers(pairs),
    )


def _number(pairs: Sequence[tuple[str, str]], name: str) -> int:
    text = next((value for key, value in pairs if key == name), "")
    return int(text) if re.fullmatch(r"\d{1,18}", text) else 0


async def _checked_form(request: Request) -> Pairs:
    """Return what was sent by a form of ours."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise HTTPException(413, WORDS["act_too_large"])
    try:
        sent = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=5000)
    except ValueError:
        raise HTTPException(400, WORDS["act_nothing"]) from None
    pairs = [
        # Browsers send each line break as these two characters.
        (name.replace("\0", ""), value.replace("\0", "").replace("\r\n", "\n"))
        for name, value in sent
    ]
    token = next((value for name, value in pairs if name == "token"), "")
    try:
        site_of(request).tokens.check(request, request.state.user, token)
    except RefusedError as error:
        raise HTTPException(403, str(error)) from None
    return pairs


async def _last_of_audit(site: Site) -> int | None:
    """Return the newest row of the audit, if its rows may be read."""
    found = await site.ask(queries.LAST_OF_AUDIT)
    return found.rows[0]["id"] if found.rows else None


async def _undo(site: Site, rows: Sequence[int]) -> str | None:
    """Return where an act can be taken back, by the rows of the audit that it has left."""
    if not 0 < len(rows) <= MAX_ROWS:
        return None
    found = await site.ask(queries.UNDOABLE, {"ids": list(rows[:1]), "limit": 1})
    if not any(undo_of(row, site.json).statements for row in found.rows):
        return None
    return f"/undo?audit={','.join(map(str, rows))}"


@form
async def undo(request: Request, site: Site, pairs: Pairs) -> tuple[Response, bool]:
    """Show what would take acts back; when its form is sent, do it, in steps."""
    is_step = request.method == "POST"
    ids, until = numbers(pairs), time.monotonic() + STEP_TIME
    progress = _so_far(pairs) if is_step else Progress()
    undos: list[Undo] = []
    problem: str | None = None
    while ids:
        some = ids[-STEP_ROWS:] if is_step else ids[-SAMPLES:]
        found = await site.ask(queries.UNDOABLE, {"ids": some, "limit": len(some)})
        problem = found.problem
        undos = [undo_of(row, site.json) for row in found.rows]
        if not is_step or problem is not None:
            break
        ids = ids[: -len(some)]
        for one in undos:
            await _take_back(site, request, one, progress)
        if time.monotonic() > until:
            break
    is_over = is_step and not ids
    answer = await site.render(
        request,
        "undo.html",
        ids=ids,
        undos=undos,
        problem=problem,
        progress=progress,
        so_far=json.dumps(progress.conflicts),
        is_step=is_step,
        is_over=is_over,
        statements=[told(call) for one in undos for call in one.calls][:SAMPLES],
    )
    return answer, is_over


async def _take_back(site: Site, request: Request, undo: Undo, progress: Progress) -> None:
    """Take one act back, as far as that can be."""
    try:
        for call in undo.calls:
            for row in (await _sent(site, request, call))[0]:
                if "conflicts" in row:
                    progress.add(row)
            progress.changed += undo.row["job_ids"] is None
    except (psycopg.DatabaseError, TooSlowError, UnreachableError) as error:
        progress.failed += 1
        progress.conflicts = [*progress.conflicts, {"reason": _refusal(error)}][:MAX_TOLD]


def _back(act: Act, call: Call) -> str:
    """Return the screen that an act belongs to."""
    if act.about == JOB:
        return f"/jobs/{call.about[0]['job_id']}" if len(call.about) == 1 else "/jobs"
    if act.about == ("name",):
        name = call.about[0]["name"]
        return "/schedules" if act.function == "unschedule_job" else schedule_path(name)
    if act.function in ("resume_ordering_key", "settle_effect", "set_limit"):
        return "/waiting"
    return "/"


def _integer(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,19}", text):
        raise ValueError(text)
    return int(text)
