"""Background jobs in the Postgres you already have.

Everything public is listed in ``__all__``; all other modules are private.
"""

from . import _libpq  # noqa: F401 - before all that needs it
from ._async_client import AsyncClient
from ._client import Client
from ._effect import Effect
from ._errors import (
    BadScheduleError,
    EffectInProgressError,
    EffectNotHeldError,
    InvalidArgumentError,
    IsolationLevelError,
    JobFinishedError,
    JobNotBlockedError,
    JobNotFoundError,
    JobRunningError,
    KeyNotStuckError,
    KeyTakenError,
    LeaseLostError,
    RotaError,
    RunInProgressError,
    UnknownQueueError,
    UnknownScheduleError,
)
from ._install import sql_dir
from ._job import AsyncJob, Job
from ._log import JsonFormatter
from ._reading import Unreadable
from ._registry import Registry
from ._rows import (
    ClaimedJob,
    EffectResult,
    EndedJob,
    EnqueuedJob,
    FailedJob,
    FinishedJob,
    Heartbeat,
    JobHeartbeat,
    NextJob,
    ReleasedJob,
    ScheduleChange,
    TickReport,
    UpcomingRun,
    Waiting,
)
from ._signals import FatalError, JobCancelled, RetryIn, Snooze
from ._version import __version__
from ._worker import Worker

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "BadScheduleError",
    "ClaimedJob",
    "Client",
    "Effect",
    "EffectInProgressError",
    "EffectNotHeldError",
    "EffectResult",
    "EndedJob",
    "EnqueuedJob",
    "FailedJob",
    "FatalError",
    "FinishedJob",
    "Heartbeat",
    "InvalidArgumentError",
    "IsolationLevelError",
    "Job",
    "JobCancelled",
    "JobFinishedError",
    "JobHeartbeat",
    "JobNotBlockedError",
    "JobNotFoundError",
    "JobRunningError",
    "JsonFormatter",
    "KeyNotStuckError",
    "KeyTakenError",
    "LeaseLostError",
    "NextJob",
    "Registry",
    "ReleasedJob",
    "RetryIn",
    "RotaError",
    "RunInProgressError",
    "ScheduleChange",
    "Snooze",
    "TickReport",
    "UnknownQueueError",
    "UnknownScheduleError",
    "Unreadable",
    "UpcomingRun",
    "Waiting",
    "Worker",
    "__version__",
    "sql_dir",
]

for _name in __all__:  # tracebacks and help() show the public name
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__
