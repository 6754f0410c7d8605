"""Nothing that a handler returns or raises can keep its job from ending."""

import json
from types import MappingProxyType
from typing import Any

import pytest

from rota.client.values import (
    Numbers,
    clean,
    dump_clean,
    dump_result,
    join_results,
    to_array,
)


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
        ("a\x00b", "a\ufffdb"),
        ("\ud800", "\ufffd"),
        ("\U0001f600", "\U0001f600"),
        (float("nan"), None),
        (float("-inf"), None),
        ({"\x00": [float("inf"), ("\udfff",)]}, {"\ufffd": [None, ["\ufffd"]]}),
        ({1: True, None: 1.5}, {1: True, None: 1.5}),
    ],
)
def test_clean_replaces_what_jsonb_refuses(value: Any, cleaned: Any) -> None:
    assert clean(value) == cleaned


def test_clean_keeps_the_rest() -> None:
    assert clean("line\nbreak\ttab\x01") == "line\nbreak\ttab\x01"


def test_dump_clean_refuses_what_is_no_json() -> None:
    with pytest.raises(TypeError):
        dump_clean(object())


def test_dump_result_drops_what_cannot_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    endless: list[Any] = []
    endless.append(endless)

    assert dump_result(object(), "job 1") is None
    assert dump_result(endless, "job 2") is None
    assert dump_result("x" * 10_000_000, "job 3") is None
    assert dump_result({"ok": 1}, "job 4") == '{"ok": 1}'
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3


@pytest.mark.parametrize(
    "value", ["a\x00b", "\ud800", {"\x00": float("inf")}, {"a": MappingProxyType({"b": 1})}]
)
def test_dump_result_cleans_what_jsonb_refuses(value: Any) -> None:
    assert dump_result(value, "job 1") == dump_clean(value)


def test_dump_result_leaves_characters_beyond_the_first_plane() -> None:
    text = dump_result("\U0001f600", "job 1")

    assert text is not None
    assert json.loads(text) == "\U0001f600"


def test_to_array_keeps_a_list_of_what_are_no_whole_numbers() -> None:
    lists: list[list[Any]] = [[], [True], [1, None], ["1"], [1.0]]

    assert type(to_array("job_ids", (1, 2**63))) is Numbers
    assert [type(to_array("queues", each)) for each in lists] == [list] * len(lists)


def test_join_results_keeps_the_place_of_what_is_missing() -> None:
    array = join_results(['{"a": 1}', None, "2"])

    assert array.dumps is not None
    assert json.loads(array.dumps(array.obj)) == [{"a": 1}, None, 2]
