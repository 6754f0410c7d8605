"""Pieces of functions that several mutants leave out."""

from __future__ import annotations

NO_CONFLICT = """\
        on conflict (idempotency_key, coalesce('pipeline ' || pipeline, job_type))
            where idempotency_key is not null do nothing"""
TOKEN = """\
          and j.lease_token = coalesce(
            v_token, _archive_jobs.lease_tokens[array_position(_archive_jobs.job_ids, j.id)])"""
# Who searches a key writes its start each time, and not once a second after a long walk.
ALL_START = [
    ("_may_be_head", "- c_walked > 200", "- c_walked >= 0"),
    ("_open_head", "- v_walked > 100", "- v_walked >= 0"),
    ("_raise_start", "_settled_start(ordering_key, searched_from)", "_key_start(ordering_key)"),
]
