"""Commands about queues: pause, resume."""

from __future__ import annotations

import argparse

from .output import acting, connected, print_json


def pause(arguments: argparse.Namespace) -> None:
    """Let no more jobs of a queue be claimed."""
    with connected(arguments) as connection, acting(connection) as client:
        client.pause_queue(arguments.queue, reason=arguments.reason)
    _print(arguments, is_paused=True)


def resume(arguments: argparse.Namespace) -> None:
    """Let the jobs of a queue be claimed again."""
    with connected(arguments) as connection, acting(connection) as client:
        client.resume_queue(arguments.queue)
    _print(arguments, is_paused=False)


def _print(arguments: argparse.Namespace, *, is_paused: bool) -> None:
    if arguments.json:
        print_json({"queue": arguments.queue, "is_paused": is_paused})
    elif is_paused:
        print(f"queue {arguments.queue} is paused: running jobs go on, no more are claimed")
    else:
        print(f"queue {arguments.queue} is open: its jobs are claimed")
