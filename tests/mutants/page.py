"""The page: each of these lets somebody see or do what he may not."""

from __future__ import annotations

from mutants.mutant import client, mutant

PAGE = (
    mutant(
        "page-form-of-anybody",
        "A form of another site acts.",
        "web/test_acts.py",
        client(
            "web/access",
            "if not hmac.compare_digest(self.of(user).encode(), token.encode()):",
            "if False:",
        ),
    ),
    mutant(
        "page-token-of-anybody",
        "The token of one user is good for another.",
        "web/test_access.py",
        client("web/access", 'f"form of {user.name}".encode()', 'b"form"'),
    ),
    mutant(
        "page-by-any-name",
        "A page that is open in the same browser gets in by a name of its own.",
        "web/test_access.py",
        client("web/access", " or name not in LOOPBACK_NAMES:", ":"),
    ),
    mutant(
        "page-believes-anybody",
        "Whoever reaches the page past its proxy says who he is.",
        "web/test_access.py",
        client(
            "web/access",
            "if address is None or not any(address in proxy for proxy in self._proxies):",
            "if address is None:",
        ),
    ),
    mutant(
        "page-two-names",
        "A client puts a name beside that of the proxy, and is believed.",
        "web/test_access.py",
        client("web/access", "if len(told) != 1 or", "if not told or"),
    ),
    mutant(
        "page-password-of-before",
        "Who leaves the password file while his password is hashed stays for good.",
        "web/test_access.py",
        client("web/access", " or self._users.get(name) != known:", ":"),
    ),
    mutant(
        "page-acts-for-observers",
        "An observer may act.",
        "web/test_access.py",
        client(
            "web/site",
            "if not (self.allow_acts and user.is_operator):",
            "if not self.allow_acts:",
        ),
    ),
    mutant(
        "page-acts-unasked",
        "A page that only shows acts as well.",
        "web/test_acts.py",
        client(
            "web/site",
            "if not (self.allow_acts and user.is_operator):",
            "if not user.is_operator:",
        ),
    ),
    mutant(
        "page-tells-what-is-masked",
        "A masked value is found out by searching for it.",
        "web/test_pages.py",
        client("web/filters", 'raise BadFilterError(WORDS["payload_masked"])', "pass"),
    ),
    mutant(
        "page-counts-what-is-masked",
        "A masked value is found out by counting the jobs that an act would be done to.",
        "web/test_pages.py",
        client("web/acts", "check_masked(site.json, wanted)", "pass"),
    ),
    mutant(
        "page-through-any-proxy",
        "Without passwords a proxy of this machine lets the world in.",
        "web/test_access.py",
        client(
            "web/access",
            "any(header.startswith(FORWARDED) for header in request.headers)",
            "False",
        ),
    ),
    mutant(
        "page-through-a-silent-proxy",
        "Without passwords a proxy that adds no header lets the world in.",
        "web/test_access.py",
        client("web/access", "if is_old or ", "if "),
    ),
    mutant(
        "page-looks-into-public",
        "The page runs what somebody has put into public, with its own rights.",
        "web/test_pages.py",
        client(
            "web/database",
            "begin {}; set local search_path = pg_catalog, pg_temp;",
            "begin {};",
        ),
    ),
    mutant(
        "page-waits-for-each",
        "Each question of a screen takes the time of all of them.",
        "web/test_pages.py",
        client(
            "web/database", "time.monotonic() + self.read_time if has_end else None", "None"
        ),
    ),
    mutant(
        "page-shows-what-was",
        "A page that was hidden gets the answer of before.",
        "web/test_pages.py",
        client(
            "web/live",
            "return is_good and self._task is not None and not self._task.done()",
            "return is_good",
        ),
    ),
    mutant(
        "page-answers-others",
        "The answer of an act is shown to another user.",
        "web/test_access.py",
        client("web/site", "return answer if of == user else None", "return answer"),
    ),
    mutant(
        "page-undoes-later-acts",
        "An undo takes back what a later act did to a job.",
        "web/test_acts.py",
        client("web/queries", "where l.id > a.id and a.job_ids is not null", "where false"),
    ),
    mutant(
        "page-undoes-later-settings",
        "An undo takes back what was set since.",
        "web/test_acts.py",
        client("web/undo", 'elif not row["is_changed_since"]:', "else:"),
    ),
    mutant(
        "page-undo-runs-again",
        "An undo of a cancel runs again what others have retried since, and has succeeded.",
        "web/test_acts.py",
        client("web/undo", ', "status": "cancelled"})', "})"),
    ),
    mutant(
        "page-undo-runs-at-once",
        "An undo of a cancel runs at once what was planned for later.",
        "web/test_acts.py",
        client("web/undo", '"keep_run_at": true, ', ""),
    ),
    mutant(
        "page-undo-leaves-dependants",
        "An undo of a cancel leaves what was cancelled because of it.",
        "web/test_acts.py",
        client("web/undo", ', "with_dependants": true', ""),
    ),
    mutant(
        "page-undoes-each-of-all",
        "An undo of several values takes back what a later act did to a job.",
        "web/test_acts.py",
        client("web/undo", "[one for one in had if one in wanted] if ids else had", "had"),
    ),
    mutant(
        "page-undo-pauses-for-ever",
        "An undo makes the pause of a breaker one that nothing ends.",
        "web/test_acts.py",
        client("web/undo", 'or before.get("set_by") == "operator"', "or bool(before)"),
    ),
    mutant(
        "page-undo-forgets-backoff",
        "An undo begins at once what has failed since.",
        "web/test_acts.py",
        client("web/queries", "a.act = 'reschedule' and r.failed_at > a.acted_at", "false"),
    ),
    mutant(
        "page-escapes-nothing",
        "A text of a job is a part of the page.",
        "web/test_pages.py",
        client("web/site", "autoescape=True", "autoescape=False"),
    ),
    mutant(
        "page-waits-for-ever",
        "A question that takes too long is never stopped.",
        "web/test_pages.py",
        client("web/database", 'sql.Literal(f"{round(seconds * 1000)}ms")', 'sql.Literal("0")'),
    ),
)
