"""The tables beside the model, row by row."""

from __future__ import annotations

from model.rows import NAMES, Rows
from model.timetable import Timetable


def differences(model: Timetable, shown: dict[str, Rows]) -> list[str]:
    """Return where the tables are not what the model has."""
    expected: dict[str, Rows] = {
        "jobs": [[*vars(job).values()] for job in model.jobs.values() if job.is_live],
        "finished_jobs": [
            [*vars(job).values()] for job in model.jobs.values() if not job.is_live
        ],
        "job_errors": [[*ref, *row] for ref, row in model.errors.items()],
        "queues": [[*vars(queue).values()] for _, queue in model.queues.items()],
        "pauses": [[queue or "", *row] for queue, row in model.pauses.items()],
        "job_definitions": [[*vars(its).values()] for _, its in model.schedules.items()],
        "halted_keys": [[key, *row] for key, row in model.halted.items()],
        "dependencies": [
            [child, parent] for child in model.parents for parent in model.parents[child]
        ],
        "effects": [[*effect, *row] for effect, row in model.effects.items()],
        "limits": [[*vars(limit).values()] for limit in model.limits.values()],
        "pipeline_stages": [
            [pipeline, *vars(stage).values()]
            for pipeline, stages in model.pipelines.items()
            for stage in stages.values()
        ],
        "stage_runs": [[*ref, *row] for ref, row in model.stage_runs.items()],
        "occurrences": [[*occurrence, *row] for occurrence, row in model.occurrences.items()],
    }
    return [
        f"{table}: {tell(table, shown[table], rows)}"
        for table, rows in expected.items()
        if _sorted(rows) != _sorted(shown[table])
    ]


def _sorted(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: row[:2])


def tell(table: str, shown: Rows, expected: Rows) -> str:
    """Tell which rows differ, and in what."""
    there = {str(row[:2]): row for row in shown}
    wanted = {str(row[:2]): row for row in expected}
    words = [f"{key} is there" for key in there if key not in wanted]
    words += [f"{key} is not there" for key in wanted if key not in there]
    for key in there.keys() & wanted.keys():
        pairs = zip(NAMES.get(table, range(99)), there[key], wanted[key], strict=False)
        words += [
            f"{key} has {name} {one}, not {two}" for name, one, two in pairs if one != two
        ]
    return ", ".join(words)
