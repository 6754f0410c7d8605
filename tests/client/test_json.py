"""Nothing that a handler returns or raises can keep its job from ending."""

from typing import Any

import pytest

from rota._json import clean, clean_text, dump_clean, storable


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


def test_clean_text_keeps_the_rest() -> None:
    assert clean_text("line\nbreak\ttab\x01") == "line\nbreak\ttab\x01"


def test_dump_clean_refuses_what_is_no_json() -> None:
    with pytest.raises(TypeError):
        dump_clean(object())


def test_storable_drops_what_cannot_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    endless: list[Any] = []
    endless.append(endless)

    assert storable(object(), 1) is None
    assert storable(endless, 2) is None
    assert storable("x" * 10_000_000, 3) is None
    assert storable({"ok": 1}, 4) == {"ok": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
