"""What the benchmarks beside other queues promise, with rota alone and without measuring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.figures import Figure, Missing, Ratio, Reading
from bench.peers import catalogue
from bench.peers.catalogue import PEERS, ROTA, NotInstalledError, Peer
from bench.peers.fleet import PeerError, Program, call
from bench.workloads import latency, workers


class OneDatabase:
    """Stands in for a server of the benchmarks."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def fresh(self, name: str) -> str:
        return self._dsn

    def drop(self, name: str) -> None: ...

    def cpu(self) -> float:
        return 0.0


def refuse(program: str) -> list[str]:
    raise NotInstalledError("npm is not there")


def script(text: str) -> Callable[[str], list[str]]:
    return lambda program: ["sh", "-c", text, "sh"]


def peer(text: str) -> Peer:
    return Peer(name="x", program="x", waiting="", prepare=script(text))


def drain(rate: float) -> workers.Drain:
    return workers.Drain(rate, 10.0, 20.0)


@pytest.mark.slow
def test_one_drain_counts_the_jobs_of_a_real_worker(dsn: str) -> None:
    found = workers.one_drain(OneDatabase(dsn), ROTA, 1, 2_000, 20.0)  # type: ignore[arg-type]

    assert found.rate > 0


@pytest.mark.slow
@pytest.mark.own_session
def test_one_round_times_the_jobs_of_a_real_worker(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "WARM_UP", 0.2)

    found = latency.one_round(OneDatabase(dsn), ROTA, 0.5)  # type: ignore[arg-type]

    assert 5 < len(found) < 40
    assert all(0 < milliseconds < 60_000 for milliseconds in found)


def test_run_says_which_peers_are_missing(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(PEERS[0], prepare=refuse)
    monkeypatch.setattr(latency, "PEERS", [absent])
    monkeypatch.setattr(
        latency, "one_round", lambda server, peer, seconds: peer.command("listen")
    )
    monkeypatch.setattr(latency, "ROTA", replace(ROTA, prepare=refuse))

    found = list(latency.run(OneDatabase(dsn), 1, True))  # type: ignore[arg-type]

    reasons = {figure.reason for figure in found if isinstance(figure, Missing)}
    assert reasons == {"npm is not there", latency.NO_PGQ}
    assert len(found) == 6


def test_figures_compare_with_the_best_peer() -> None:
    names = [ROTA.name, PEERS[0].name, PEERS[1].name]
    found = {(name, 1): [drain(rate)] for name, rate in zip(names, (30, 10, 20), strict=True)}
    missing = {(each.name, 1): "gone" for each in PEERS[2:]}
    table: dict[tuple[str, int], list[workers.Drain]] = {**found}
    for each in workers.EVERYBODY:
        table.setdefault((each.name, 1), [])

    figures: list[Figure] = list(workers.figures(1, table, missing))

    assert isinstance(figures[0], Ratio)
    assert (figures[0].yardstick, figures[0].value) == (PEERS[1].name, 1.5)
    assert sum(isinstance(figure, Missing) for figure in figures) == len(PEERS) - 2
    assert sum(isinstance(figure, Reading) for figure in figures) == 9


def test_call_raises_with_the_last_words_of_a_program() -> None:
    with pytest.raises(PeerError, match="fill failed: no luck"):
        call(peer("echo trying; echo no luck >&2; exit 1"), "fill", "")


def test_check_notices_a_worker_that_ended() -> None:
    with Program(peer("exit 0"), "work", "") as program:
        program._process.wait()

        with pytest.raises(PeerError, match="ended by itself: it said nothing"):
            program.check()


def test_a_program_gets_its_settings_by_step() -> None:
    one = replace(ROTA, settings={"BATCH": "9"}, idle_settings={"BATCH": "1"})

    assert one.environment("work", jobs=3)["BENCH_BATCH"] == "9"
    assert one.environment("listen")["BENCH_BATCH"] == "1"
    assert one.environment("work", jobs=3)["BENCH_JOBS"] == "3"
    assert "BENCH_BATCH" not in one.environment("fill")


def test_read_leaves_out_a_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("1 100\n2 200\n1 150\n3 30")

    assert latency.read(path) == {1: 100, 2: 200}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(catalogue, "CACHE", tmp_path)

    def fake(*command: str) -> None:
        calls.append(command[2])
        (tmp_path / "awa").mkdir(exist_ok=True)

    monkeypatch.setattr(catalogue, "call", fake)
    return calls


def test_in_python_installs_once(cache: list[str]) -> None:
    catalogue.in_python("with_awa.py")
    catalogue.in_python("with_awa.py")

    assert cache == ["venv", "pip"]


def test_every_peer_is_pinned_and_named_by_its_version() -> None:
    pins = "\n".join(path.read_text() for path in (catalogue.HERE / "pins").iterdir())

    for each in PEERS:
        assert each.name.split()[-1] in pins
        assert (catalogue.HERE / each.program).exists()
