"""The end of the demo: the table of what happened, the mailbox, and the proof."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .display import COLORS
from .mail import message_id
from .outage import AWAY, GUARDED, JOBS
from .play import Happened
from .proof import Check
from .records import Run

POLICY = """\
The guard is a record in rota.effects, committed before the mail leaves. An attempt that finds
it does not send: at most one mail, and none if a worker dies between the two. The other policy,
if_unknown="again", is to send again: at least one mail, perhaps two."""


def print_report(console: Console, happened: Happened, checks: Sequence[Check]) -> None:
    """Print what happened, and whether all of it is as told."""
    console.print()
    console.print(_jobs(console, happened))
    console.print(_mails(console, happened))
    console.print(_outage(console, happened))
    console.print()
    for check in checks:
        mark = Text("  ok   ", "green") if check.is_true else Text("  NOT  ", "bold red")
        found = "" if check.is_true else f": {check.found}"
        console.print(mark + Text(f"{check.claim}{found}", ""))
    console.print(f"\n{POLICY}\n", style="dim")


def _jobs(console: Console, happened: Happened) -> Table:
    table = _table(console, "What happened, from rota.job_runs and rota.job_errors")
    for column in ("id", "job", "status", "attempts", "what came of each attempt"):
        table.add_column(column)
    about = {part.key: part.about for part in happened.parts}
    for run in happened.runs:
        table.add_row(
            str(run.id),
            f"{run.job_type} ({about[run.idempotency_key]})",
            Text(run.status, COLORS.get(run.status, "")),
            str(run.attempts),
            Text("\n".join(_attempts(run))),
        )
    return table


def _attempts(run: Run) -> list[str]:
    lines = [f"{f.attempt} {f.worker}: {f.error}" for f in run.failures]
    if run.status == "succeeded":
        lines.append(f"{run.attempts} {run.worker}: {run.result}")
    return lines


def _mails(console: Console, happened: Happened) -> Table:
    table = _table(console, "The provider's mailbox")
    for column in ("mails", "report", "Message-ID"):
        table.add_column(column)
    for part in happened.parts:
        if part.sends_mail:
            mail = message_id(part.key)
            table.add_row(str(happened.mails[mail]), part.about, Text(mail))
    return table


def _outage(console: Console, happened: Happened) -> Table:
    table = _table(
        console, f"A server is away for {AWAY:.0f} s, and {JOBS} webhooks wait for it"
    )
    for column in ("breaker", "delivered", "attempts", "last delivered after its return"):
        table.add_column(column)
    for outage in happened.outage:
        table.add_row(
            "yes" if outage.queue == GUARDED else "no",
            str(outage.delivered),
            str(outage.attempts),
            f"{outage.late:.1f} s",
        )
    return table


def _table(console: Console, title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2,
    )
