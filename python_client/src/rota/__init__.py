"""Background jobs in the Postgres you already have.

Everything public is listed in ``__all__``; all other modules are private.
"""

__version__ = "0.2.0"  # the same as that of the SQL that it has

try:
    import psycopg as psycopg
except ModuleNotFoundError:
    raise
except ImportError as error:  # it finds no libpq: say in one line what to do
    _problem = str(error).partition("\n")[0].rstrip(".")
    _hint = "pip install 'rota[binary]' installs one with its libpq"
    raise ImportError(f"psycopg cannot be loaded, {_problem}: {_hint}") from None

from .client.async_client import AsyncClient
from .client.statement import Unreadable
from .client.sync_client import Client
from .codec import Codec
from .exceptions import (
    BadScheduleError,
    EffectInProgressError,
    EffectNotHeldError,
    FatalError,
    InvalidArgumentError,
    IsolationLevelError,
    JobCancelled,
    JobFinishedError,
    JobMovedError,
    JobNotBlockedError,
    JobNotFoundError,
    JobRunningError,
    KeyNotHaltedError,
    KeyTakenError,
    LeaseLostError,
    NoDatabaseNumberError,
    NotGrantedError,
    RetryIn,
    RotaError,
    RunInProgressError,
    Snooze,
    TimeLimitExceeded,
    UnknownQueueError,
    UnknownScheduleError,
)
from .job import AsyncJob, Effect, Job, JobEnd
from .registry import Registry
from .rows import (
    ActReport,
    ClaimedJob,
    EffectResult,
    EndedJob,
    EnqueuedJob,
    FailedJob,
    Finding,
    FinishedJob,
    ForwardJob,
    Heartbeat,
    JobCount,
    JobHeartbeat,
    JobResult,
    JobStats,
    MoveFinding,
    MoveStatus,
    NextJob,
    Reason,
    ReceivedJob,
    ReleasedJob,
    RisingFailure,
    ScheduleChange,
    TakenMoves,
    TickReport,
    UntakenJobs,
    UpcomingRun,
    Verdict,
    Waiting,
    WaitingMove,
)
from .schema import install, sql_dir
from .tasks import Task
from .worker.events import JsonFormatter
from .worker.worker import Worker

__all__ = [
    "ActReport",
    "AsyncClient",
    "AsyncJob",
    "BadScheduleError",
    "ClaimedJob",
    "Client",
    "Codec",
    "Effect",
    "EffectInProgressError",
    "EffectNotHeldError",
    "EffectResult",
    "EndedJob",
    "EnqueuedJob",
    "FailedJob",
    "FatalError",
    "Finding",
    "FinishedJob",
    "ForwardJob",
    "Heartbeat",
    "InvalidArgumentError",
    "IsolationLevelError",
    "Job",
    "JobCancelled",
    "JobCount",
    "JobEnd",
    "JobFinishedError",
    "JobHeartbeat",
    "JobMovedError",
    "JobNotBlockedError",
    "JobNotFoundError",
    "JobResult",
    "JobRunningError",
    "JobStats",
    "JsonFormatter",
    "KeyNotHaltedError",
    "KeyTakenError",
    "LeaseLostError",
    "MoveFinding",
    "MoveStatus",
    "NextJob",
    "NoDatabaseNumberError",
    "NotGrantedError",
    "Reason",
    "ReceivedJob",
    "Registry",
    "ReleasedJob",
    "RetryIn",
    "RisingFailure",
    "RotaError",
    "RunInProgressError",
    "ScheduleChange",
    "Snooze",
    "TakenMoves",
    "Task",
    "TickReport",
    "TimeLimitExceeded",
    "UnknownQueueError",
    "UnknownScheduleError",
    "Unreadable",
    "UntakenJobs",
    "UpcomingRun",
    "Verdict",
    "Waiting",
    "WaitingMove",
    "Worker",
    "__version__",
    "install",
    "sql_dir",
]

for _name in __all__:  # tracebacks and help() show the public name
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__
