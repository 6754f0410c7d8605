"""The screens, each of which answers one question.  None of them changes anything."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any
from urllib.parse import urlencode

import psycopg
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from ..client.connecting import one_line
from ..client.listing import FEW, listed
from ..exceptions import JobMovedError, RotaError
from . import queries
from .acts import BULK, DANGERS, WANTED
from .database import Row, TooSlowError, UnreachableError
from .filters import (
    COLUMNS,
    LIVE,
    MAX_LENGTH,
    SHOWN,
    STATUSES,
    BadFilterError,
    Filter,
    check_masked,
    row_id,
)
from .plots import STEPS, TIMES, dependencies, ended, times
from .show import WORDS
from .site import MISSING, Answer, Site, site_of
from .undo import is_not_kept, may_be_undone

Screen = Callable[[Request], Awaitable[Response]]
SEVERITIES = ("critical", "warning", "ok")
PAGE_SIZES = (50, 200)
PARTS = 24
AUDITED = ("who", "act", "queue", "job")
ALL_AUDITED: dict[str, Any] = {"before": None, "who": None, "act": None, "queue": None}
FIRST_STEP = 20_000
FIRST_TIME, SEARCH_TIME = 0.04, 1.0
"""Seconds of a search until the page is shown, and of each that goes on with it."""
SINCE = {"1h": "1 hours", "1d": "1 days", "7d": "7 days", "90d": "90 days"}


def screen(answer: Callable[[Request, Site], Awaitable[Response]]) -> Screen:
    """Make a screen of a function; open pages that load it again share its answer."""

    @wraps(answer)
    async def found(request: Request) -> Response:
        site = site_of(request)
        if "rota-live" not in request.headers:
            return await answer(request, site)
        key = f"{request.state.user}{request.url}"
        return await site.pulse.share(key, lambda: answer(request, site))

    return found


@screen
async def overview(request: Request, site: Site) -> Response:
    """Tell whether it is well."""
    findings = await site.ask_cached(queries.DOCTOR, 5)
    queues = await site.ask_cached(queries.QUEUES, 2)
    ticker = await site.ask(queries.TICKER)
    died = await site.ask_cached(queries.DIED, 5)
    pauses = await site.ask(queries.PAUSES)
    workers = await site.ask_cached(queries.WORKERS, 2)
    running = await site.ask(queries.RUNNING)
    since = request.query_params.get("since", "1h")
    since = since if since in STEPS else "1h"
    wanted = Filter.of(request.query_params.multi_items())
    asked: dict[str, Any] = {
        "since": SINCE[since],
        "step": STEPS[since][0],
        "queues": [wanted.get("queue")] if wanted.get("queue") else None,
        "job_types": [wanted.get("type")] if wanted.get("type") else None,
    }
    statistics = await site.ask(queries.STATISTICS, asked)
    whole = await site.ask(queries.STATISTICS, asked | {"step": "total"})
    deploys = await site.ask(queries.DEPLOYS, asked)
    place = await site.place()
    found, now, marks = statistics.rows, place["now"], deploys.rows
    total = whole.rows[0] if whole.rows else {}
    plots = [
        ended(found, since, now, marks),
        times(found, total, TIMES[0], since, now, WORDS["plot_wait_title"], marks),
        times(found, total, TIMES[1], since, now, WORDS["plot_run_title"], marks),
    ]
    by_severity = {
        severity: [row for row in findings.rows if row["severity"] == severity]
        for severity in SEVERITIES
    }
    worst = next((s for s in SEVERITIES[:2] if by_severity[s]), "ok")
    kinds: dict[str, list[Row]] = {}
    for row in by_severity["critical"] + by_severity["warning"]:
        kinds.setdefault(row["finding"], []).append(row)
    return await site.render(
        request,
        "overview.html",
        findings=findings,
        by_severity=by_severity,
        kinds=list(kinds.values()),
        worst="unknown" if findings.problem else worst,
        queues=queues,
        ticker=ticker,
        pauses=pauses,
        died=died,
        workers=workers,
        running=running,
        plots=plots,
        statistics=statistics,
        whole=whole,
        deploys=deploys,
        since=since,
        spans=list(STEPS),
        wanted=wanted,
        totals=dict.fromkeys(queries.COUNTED)
        if queues.problem
        else queries.totals(queues.rows),
    )


@screen
async def jobs(request: Request, site: Site) -> Response:
    """Find jobs."""
    wanted, view = Filter.of(request.query_params.multi_items()), _view(request)
    typed = request.query_params.get("q", "").strip()
    if typed:
        address = wanted.with_words(typed).address(**view)
        return RedirectResponse(f"{_base(request)}/jobs?{address}", 303)
    columns = [c for c in request.query_params.getlist("col") if c in COLUMNS] or list(SHOWN)
    columns += [c for c in request.query_params.getlist("col") if c.startswith("payload.")]
    size = PAGE_SIZES[request.query_params.get("size") == str(PAGE_SIZES[1])]
    answer, problem = Answer(), None
    try:
        answer = await _listed(request, site, wanted, columns, size)
        problem = answer.problem
    except (BadFilterError, psycopg.errors.DataError) as error:
        problem = one_line(error)
    queues = await site.ask_cached(queries.QUEUES, 2)
    types = await site.ask_cached(queries.TYPES, 60)
    counts = await _counts(site, wanted)
    rows = answer.rows[:size]
    more = rows[-1]["id"] if len(answer.rows) > size else None
    return await site.render(
        request,
        "jobs.html",
        wanted=wanted,
        rows=rows,
        problem=problem,
        columns=columns,
        payload_column=next((c for c in columns if c.startswith("payload.")), ""),
        all_columns=COLUMNS,
        statuses=STATUSES,
        counts=counts,
        known={
            "queue": [row["queue"] for row in queues.rows],
            "type": [row["job_type"] for row in types.rows],
        },
        before=request.query_params.get("before"),
        view=f"&{urlencode(view, doseq=True)}" if view else "",
        older=wanted.address(before=more, **view) if more else None,
        bulk=[
            act
            for act in BULK
            if not wanted.values.get("status")
            or any(act in WANTED.get(status, ()) for status in wanted.values["status"])
        ],
        dangers=DANGERS,
        size=size,
        looked_to=answer.looked_to,
        further=wanted.address(before=answer.looked_to, **view),
    )


async def _listed(
    request: Request, site: Site, wanted: Filter, columns: list[str], size: int
) -> Answer:
    values = wanted.asked()
    if (before := row_id(request.query_params.get("before", ""))) is not None:
        values["before"] = before
    check_masked(site.json, wanted)
    has_payload = any(column.startswith("payload.") for column in columns)
    answer = await _searched(site, values, size + 1, payload=has_payload)
    for row in answer.rows:
        for column in columns:
            if column.startswith("payload."):
                row[column] = _at(site, row["payload"], column.removeprefix("payload."))
    return answer


async def _searched(
    site: Site, values: dict[str, Any], wanted: int, *, payload: bool
) -> Answer:
    """Return the newest jobs that match, searched in steps, each over twice as many ids.

    A step counts ids and not jobs: in a database with a number ids are far apart.

    To find a rare job among millions takes time: the answer says how far back the search went,
    and a page that has found none continues by itself.
    """
    if "ids" in values or ("queue" in values and await _are_few(site, values)):
        question = listed(values, payload=payload, are_few=True)
        return await site.ask(question, {**values, "limit": wanted})
    question = listed([*_sides(values), *values, "before", "from"], payload=payload)
    newest = await site.ask(queries.NEWEST)
    if newest.problem:
        return newest
    allowed = SEARCH_TIME if "before" in values else FIRST_TIME
    row = newest.rows[0]
    before = min(values.get("before", 1 << 62), row["id"] + 1)
    answer, step, until = Answer(), FIRST_STEP, time.monotonic() + allowed
    while before > 1 and len(answer.rows) < wanted:
        began = time.monotonic()
        if began > until:
            answer.looked_to = before
            break
        stride, least = (row["stride"], row["since"]) if before > row["since"] else (1, 0)
        begin = max(before - step * stride, least)
        more = {"before": before, "from": begin, "limit": wanted - len(answer.rows)}
        found = await site.ask(question, {**values, **more})
        answer.rows += found.rows
        if found.problem:
            answer.problem, answer.looked_to = found.problem, before
            break
        before = begin
        rate = step / max(time.monotonic() - began, 1e-6)
        left = until - time.monotonic()
        step = int(min(step * 2, max(rate * left, FIRST_STEP / 4)))
    return answer


async def _are_few(site: Site, values: dict[str, Any]) -> bool:
    found = await site.ask(FEW, values)
    return bool(found.rows and found.rows[0]["are_few"])


async def _counts(site: Site, wanted: Filter) -> dict[str, int]:
    """Return how many jobs there are of each status that is counted anyway."""
    discarded = wanted.get("discarded")
    if discarded not in ("", "no") or set(wanted.values) - {"queue", "status", "discarded"}:
        return {}
    found = await site.ask(queries.COUNTS, {"queue": wanted.get("queue") or None})
    counts = {row["status"]: row["jobs"] for row in found.rows}
    if not discarded and "dead" in wanted.values.get("status", ()):
        counts.pop("dead", None)  # it leaves out the discarded ones, which are listed
    return counts


def _sides(values: dict[str, Any]) -> list[str]:
    """Return in which of the two tables jobs of these statuses can be."""
    statuses = set(values.get("status", STATUSES))
    if statuses <= LIVE:
        return ["is_live"]
    return [] if statuses & LIVE else ["is_ended"]


def _at(site: Site, payload: str | None, path: str) -> str:
    """Return what is at a path of a payload, as far as it may be shown."""
    if payload is None or site.json.payloads == "hide":
        return ""
    try:
        value = site.json.parsed(payload)
    except (ValueError, RecursionError):
        return "…"
    for key in path.split("."):
        if not isinstance(value, dict) or site.json.is_masked(key):
            return ""
        value = value.get(key, "")
    return site.json.told(value)


def _view(request: Request) -> dict[str, Any]:
    """Return what of the address is about how a list is shown."""
    asked = {name: request.query_params.getlist(name) for name in ("col", "size")}
    return {name: values for name, values in asked.items() if values}


@screen
async def job(request: Request, site: Site) -> Response:
    """Tell all about a job."""
    job_id = {"id": _id(request)}
    found = await site.ask(queries.JOB, job_id)
    try:
        reasons = await site.ask(queries.EXPLAIN, job_id)
    except psycopg.errors.DatabaseError as error:
        reasons = Answer(problem=one_line(error))  # it is not here, or went while we looked
        if not found.rows and error.sqlstate == JobMovedError.sqlstate:
            raise HTTPException(404, reasons.problem) from None
    if not found.rows and found.problem is None:
        raise HTTPException(404, WORDS["no_job"].format(job_id["id"]))
    row = found.rows[0] if found.rows else {}
    attempts = await site.ask(queries.ATTEMPTS, job_id)
    parents = await site.ask(queries.PARENTS, job_id)
    children = await site.ask(queries.CHILDREN, job_id)
    stages = await site.ask(queries.STAGES, job_id)
    acts = {**ALL_AUDITED, "job": job_id["id"], "since": row.get("created_at"), "limit": 50}
    audit = await site.ask(queries.AUDIT, acts)
    pipeline = Answer()
    if row.get("pipeline"):
        pipeline = await site.ask(queries.PIPELINE, {"pipeline": row["pipeline"]})
    return await site.render(
        request,
        "job.html",
        job_id=job_id["id"],
        found=found,
        job=row,
        reasons=[r for r in reasons.rows if r["reason"] != "attempt"],
        reasons_problem=reasons.problem,
        attempts=attempts,
        events=_happened(row, attempts.rows, stages.rows, audit.rows) if row else [],
        parents=parents,
        children=children,
        stages=stages,
        pipeline=pipeline,
        audit=audit,
        graph=dependencies(row, parents.rows, children.rows, _base(request)) if row else "",
    )


@dataclass
class Event:
    """Something that happened to a job."""

    at: datetime
    kind: str
    text: str
    row: Row | None = None


def _happened(
    job: Row, attempts: list[Row], stages: list[Row], audit: list[Row]
) -> list[Event]:
    """Tell the story of a job, the oldest first."""
    events = [Event(job["created_at"], "created", WORDS["happened_created"])]
    if job["scheduled_for"]:
        events[0].text = WORDS["happened_scheduled"].format(job["definition"])
    for row in attempts:
        text = WORDS["happened_failed"].format(row["attempt"], row["worker"])
        events.append(Event(row["failed_at"], "failed", text, row))
    for act in audit:
        text = WORDS["happened_act"].format(act["act"], act["actor"] or act["role"])
        events.append(Event(act["acted_at"], "acted", text))
    for stage in stages:
        text = WORDS["happened_stage"].format(stage["stage"], WORDS[stage["status"]])
        events.append(Event(stage["finished_at"], stage["status"], text))
    is_new = all(row["started_at"] != job["started_at"] for row in attempts)
    if job["started_at"] and job["locked_by"] and is_new:
        text = WORDS["happened_started"].format(job["attempts"], job["locked_by"])
        events.append(Event(job["started_at"], "running", text))
    if job["cancel_requested_at"]:
        text = WORDS["happened_cancel"].format(job["cancel_reason"] or WORDS["no_reason"])
        events.append(Event(job["cancel_requested_at"], "cancelled", text))
    if job["finished_at"]:
        events.append(
            Event(
                job["finished_at"],
                job["status"],
                WORDS[f"happened_{job['status']}"].format(job["attempts"], job["max_attempts"]),
            )
        )
    return sorted(events, key=lambda event: event.at)


@dataclass
class Group:
    """Failures with the same error."""

    queues: list[str]
    job_type: str
    error_type: str | None
    message: str
    failures: int
    jobs: int
    first_failed_at: datetime
    last_failed_at: datetime
    last_job_id: int
    parts: list[int]

    def __post_init__(self) -> None:
        """Count how many failures there were in each part of the time."""
        found = Counter(min(max(part, 1), PARTS) for part in self.parts)
        self.parts = [found[part] for part in range(1, PARTS + 1)]

    @property
    def address(self) -> str:
        """Return the filter of its jobs; of no text there is none, so only of the last one."""
        if not self.message:
            return f"id={self.last_job_id}"
        told = {
            "queue": self.queues[0] if len(self.queues) == 1 else None,
            "type": self.job_type,
            "error_type": self.error_type,
            "group": self.message,
        }
        return urlencode([(name, value) for name, value in told.items() if value])


@screen
async def errors(request: Request, site: Site) -> Response:
    """Tell what failed, each error once."""
    since = request.query_params.get("since", "1d")
    wanted = Filter.of(request.query_params.multi_items())
    values = {
        "since": SINCE.get(since, SINCE["1d"]),
        "queue": wanted.get("queue") or None,
        "job_type": wanted.get("type") or None,
        "max_rows": queries.MAX_ERRORS,
        "limit": None,
    }
    answer = await site.ask(queries.ERRORS, values)
    groups = [Group(**row) for row in answer.rows]
    order = "jobs" if request.query_params.get("order") == "jobs" else "last_failed_at"
    shown = sorted(groups, key=lambda group: getattr(group, order), reverse=True)
    failures = sum(group.failures for group in shown)
    return await site.render(
        request,
        "errors.html",
        groups=shown[: queries.MAX_LISTED],
        cut_at=queries.MAX_LISTED if len(shown) > queries.MAX_LISTED else None,
        problem=answer.problem,
        since=since if since in SINCE else "1d",
        spans=list(SINCE),
        is_cut=failures >= queries.MAX_ERRORS,
        wanted=wanted,
        order=order,
    )


@screen
async def schedules(request: Request, site: Site) -> Response:
    """Tell what comes, and what became of what was planned."""
    text = request.query_params.get("name", "").strip()[:63] or None
    found = await site.ask(queries.SCHEDULES, {"text": text})
    await _describe(site, found.rows)
    return await site.render(request, "schedules.html", found=found, text=text or "")


async def _describe(site: Site, rows: list[Row]) -> None:
    """Give each of these schedules its words, or what is wrong with its text."""
    words = await _words_of(site, list({row["schedule"] for row in rows}))
    for row in rows:
        row["description"] = words.get(row["schedule"], row["schedule"])


async def _words_of(site: Site, schedules: list[str]) -> dict[str, str]:
    try:
        answer = await site.ask(queries.DESCRIBED, {"schedules": schedules})
    except psycopg.DatabaseError as error:
        if error.sqlstate != "RT006":
            raise
        if len(schedules) == 1:
            return {schedules[0]: one_line(error)}
        half = len(schedules) // 2  # of many few are broken
        first = await _words_of(site, schedules[:half])
        return first | await _words_of(site, schedules[half:])
    return {row["schedule"]: row["description"] for row in answer.rows}


@screen
async def schedule(request: Request, site: Site) -> Response:
    """Tell all about a schedule."""
    asked = request.path_params["name"] or request.query_params.get("name", "")
    name = {"name": str(asked)[:63]}
    found = await site.ask(queries.SCHEDULE, name)
    if not found.rows and found.problem is None:
        raise HTTPException(404, WORDS["no_schedule"].format(name["name"]))
    await _describe(site, found.rows)
    row = found.rows[0] if found.rows else {}
    upcoming = Answer()
    if row.get("is_enabled"):
        try:
            upcoming = await site.ask(queries.UPCOMING, name)
        except psycopg.errors.DatabaseError as error:
            upcoming = Answer(problem=one_line(error))
    return await site.render(
        request,
        "schedule.html",
        name=name["name"],
        found=found,
        schedule=row,
        upcoming=upcoming,
        occurrences=await site.ask(queries.OCCURRENCES, name),
    )


@screen
async def workers(request: Request, site: Site) -> Response:
    """Tell who works, and at what."""
    return await site.render(
        request,
        "workers.html",
        workers=await site.ask_cached(queries.WORKERS, 2),
        running=await site.ask(queries.RUNNING),
    )


@screen
async def waiting(request: Request, site: Site) -> Response:
    """Tell who waits behind whom."""
    return await site.render(
        request,
        "waiting.html",
        halted=await site.ask(queries.HALTED),
        effects=await site.ask(queries.EFFECTS),
        limits=await site.ask_cached(queries.LIMITS, 2),
        shares=await site.ask(queries.SHARES),
        use=await site.ask(queries.USE_BY_KEY),
        breakers=await site.ask(queries.BREAKERS),
        parents=await site.ask(queries.PARENTS_OF_MOST),
    )


@screen
async def audit(request: Request, site: Site) -> Response:
    """Tell who did what."""
    asked: dict[str, Any] = {
        name: row_id(request.query_params.get(name, "")) for name in ("before", "job")
    }
    wanted = {
        name: text
        for name in AUDITED
        if (text := request.query_params.get(name, "").strip()[:MAX_LENGTH])
    }
    words: dict[str, Any] = {name: wanted.get(name) for name in AUDITED if name != "job"}
    created = Answer()
    if asked["job"] is not None:
        created = await site.ask(queries.CREATED, {"id": asked["job"]})
    words["since"] = created.rows[0]["created_at"] if created.rows else None
    found = await site.ask(queries.AUDIT, {**asked, **words, "limit": PAGE_SIZES[0] + 1})
    rows = found.rows[: PAGE_SIZES[0]]
    for row in rows:
        row["changes"] = site.json.changes(row["before"], row["after"])
        row["may_be_undone"], row["is_not_kept"] = may_be_undone(row), is_not_kept(row)
    older = urlencode({**wanted, "before": rows[-1]["id"]}) if rows else ""
    return await site.render(
        request,
        "audit.html",
        found=found,
        rows=rows,
        job=asked["job"],
        wanted=wanted,
        chips=[
            (name, text, urlencode({n: t for n, t in wanted.items() if n != name}))
            for name, text in wanted.items()
        ],
        address=lambda **more: urlencode({**wanted, **more}),
        older=older if len(found.rows) > len(rows) else None,
    )


async def health(request: Request) -> Response:
    """Tell machines what the doctor says: 503 if it is critical, or if nothing is said."""
    site = site_of(request)
    answer = Answer(problem=WORDS["unreachable"])
    try:
        answer = await site.ask_cached(queries.DOCTOR, 5)
    except (psycopg.Error, UnreachableError) as error:
        answer.problem = one_line(error) or WORDS["unreachable"]
    worst = answer.rows[0]["severity"] if answer.rows else "unknown"
    told: dict[str, Any] = {
        "status": worst,
        "findings": [row for row in answer.rows if row["severity"] != "ok"],
    }
    if answer.problem:
        told["problem"] = answer.problem
    return JSONResponse(told, 200 if worst in ("ok", "warning") else 503)


def _id(request: Request) -> int:
    text = str(request.path_params["job_id"])
    if (found := row_id(text)) is None:
        raise HTTPException(404, WORDS["no_job"].format(text[:40]))
    return found


def _base(request: Request) -> str:
    return str(request.scope.get("root_path", ""))


async def trouble(request: Request, error: Exception) -> Response:
    """Say why there is no page, or why nothing was done."""
    site, hint = site_of(request), ""
    match error:
        case UnreachableError():
            status, title, text = 503, WORDS["unreachable"], WORDS["unreachable_text"]
        case TooSlowError():
            status, title, text = 503, WORDS["too_slow_title"], site.too_slow()
        case HTTPException(status_code=404):
            is_bare = error.detail == "Not Found"  # as Starlette says of an unknown address
            status, title = 404, WORDS["not_found"]
            text = WORDS["nothing_here"] if is_bare else error.detail
        case HTTPException():
            status, title, text = error.status_code, WORDS["not_done"], error.detail
        case _:  # the database refuses
            status, title, text = 500, WORDS["refused"], one_line(error)
            if isinstance(error, psycopg.errors.InsufficientPrivilege):
                hint = WORDS["grant_needed"]
            elif isinstance(error, MISSING):
                hint = WORDS["not_installed"]
    return site.plain(request, "trouble.html", status, title=title, text=text, hint=hint)


HANDLERS: dict[Any, Any] = dict.fromkeys(
    (HTTPException, UnreachableError, TooSlowError, psycopg.Error, RotaError), trouble
)

ROUTES: list[tuple[str, Screen]] = [
    ("/", overview),
    ("/jobs", jobs),
    ("/jobs/{job_id}", job),
    ("/errors", errors),
    ("/schedules", schedules),
    ("/schedules/{name:path}", schedule),
    ("/workers", workers),
    ("/waiting", waiting),
    ("/audit", audit),
    ("/health", health),
]
