"""What is refused when a handler is registered, or a delay is made."""

import sys
from datetime import timedelta
from typing import Any

import pytest

import rota
from rota import Registry


def test_handler_without_a_name_is_refused() -> None:
    registry = Registry()

    with pytest.raises(TypeError, match=r'^use @registry\.handler\("job_type"\)$'):

        @registry.handler  # type: ignore[arg-type]
        def send_mail(job: rota.Job) -> None: ...


@pytest.mark.parametrize("name", ["a", "Mail:send/v1.2-x_y", "0", "x" * 63])
def test_name_of_a_good_form_is_taken(name: str) -> None:
    registry = Registry()
    registry.add(name, lambda job: None)

    assert registry.job_types == [name]


@pytest.mark.parametrize("name", ["", "x" * 64, " a", "a b", "-a", "é", "a\n"])
def test_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(
        rota.InvalidArgumentError, match=r"^job_type must be 1 to 63 of the characters"
    ):
        Registry().add(name, lambda job: None)


def test_second_handler_of_a_type_is_refused() -> None:
    registry = Registry()
    registry.add("a", lambda job: None)

    with pytest.raises(ValueError, match="already"):
        registry.add("a", lambda job: None)


class Handler:
    def good(self, job: rota.Job) -> None: ...

    def __call__(self, job: rota.Job) -> None: ...


async def in_loop(job: rota.AsyncJob, times: int = 1) -> None: ...


@pytest.mark.parametrize("handler", [in_loop, Handler(), Handler().good, print, dict, min])
def test_whatever_can_be_called_with_the_job_is_taken(handler: Any) -> None:
    Registry().add("a", handler)


@pytest.mark.parametrize(
    "handler",
    [
        lambda: None,
        lambda job, more: None,
        lambda *, job: None,
        Handler.good,
        "send_mail",
        None,
    ],
)
def test_what_cannot_be_called_with_the_job_is_refused(handler: Any) -> None:
    with pytest.raises(TypeError, match=r"^the handler of 'a' is called with the job alone"):
        Registry().add("a", handler)


def test_types_that_only_a_type_checker_knows_are_not_asked_for() -> None:
    """From Python 3.14 on without the import from __future__, which the others need."""
    lazy = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    names: dict[str, Any] = {}
    exec(f"{lazy}def send(job: Hidden) -> Unknown: ...\ndef none() -> Hidden: ...", names)

    Registry().add("send", names["send"])
    with pytest.raises(TypeError, match="called with the job alone, which none does not take"):
        Registry().add("none", names["none"])


async def _async_with_plain(job: rota.Job) -> None: ...


def _plain_with_async(job: rota.AsyncJob) -> None: ...


def _either(job: rota.Job | rota.AsyncJob) -> None: ...


class _Callable:
    async def __call__(self, job: rota.Job) -> None: ...


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (_async_with_plain, r"an async function: let its job be of type rota\.AsyncJob, not"),
        (_plain_with_async, r"a plain function, or .*: let its job be of type rota\.Job, not"),
        (_Callable(), r"an async function"),
    ],
)
def test_a_job_of_the_wrong_kind_is_refused(handler: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^the handler of 'a' is {message}"):
        Registry().handler("a")(handler)


def test_a_handler_for_either_kind_of_job_is_fine() -> None:
    Registry().add("a", _either)


@pytest.mark.parametrize("make", [rota.Snooze, rota.RetryIn])
@pytest.mark.parametrize(
    ("delay", "error"),
    [
        ("1 hour", TypeError),
        (None, TypeError),
        (True, TypeError),
        (-1, ValueError),
        (timedelta(seconds=-1), ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
    ],
)
def test_delay_of_another_form_is_refused_where_it_is_made(
    make: Any, delay: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"^delay must be a timedelta or seconds >= 0, got "):
        make(delay)


@pytest.mark.parametrize("make", [rota.Snooze, rota.RetryIn])
@pytest.mark.parametrize("delay", [90, 90.0, timedelta(minutes=1.5)])
def test_delay_is_a_timedelta_or_seconds(make: Any, delay: Any) -> None:
    assert make(delay).delay == timedelta(seconds=90)
