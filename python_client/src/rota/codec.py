"""Values of a task's parameters as JSON, and back by the types of the parameters."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import MISSING, InitVar, fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial, reduce
from itertools import chain, combinations, repeat
from operator import or_
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NewType,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from uuid import UUID

Decoder = Callable[[Any], Any]
_BYTES = (bytes, bytearray, memoryview)
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")

_TEXTS: dict[Any, Callable[[str], Any]] = {
    UUID: UUID,
    Decimal: Decimal,
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
}


class Codec:
    """How arguments and results of tasks become JSON, and arguments become values again.

    | value | JSON |
    |---|---|
    | None, bool, int, float, str | itself |
    | list, tuple, set, frozenset | array |
    | mapping, dataclass, TypedDict, model of pydantic | object |
    | datetime, date, time | text as by ``isoformat()`` |
    | timedelta | seconds |
    | UUID, Decimal | text |
    | Enum | its value |

    For other types override both methods, call ``super()`` for the rest, and give the codec to
    the `Registry`.
    """

    def encode(self, value: Any) -> Any:
        """Return a value as JSON has it; raise TypeError for one of an unknown type."""
        if isinstance(value, Enum):
            return self.encode(value.value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, datetime | date | time):
            return value.isoformat()
        if isinstance(value, UUID | Decimal):
            return str(value)
        if isinstance(value, timedelta):
            return value.total_seconds()
        if isinstance(value, Mapping):
            items = {_key(self.encode(key)): self.encode(item) for key, item in value.items()}
            if len(items) < len(value):
                raise TypeError("two keys of a mapping are one key in JSON")
            return items
        if isinstance(value, Set):
            # In an order that is the same in each process.
            return sorted(map(self.encode, value), key=partial(json.dumps, sort_keys=True))
        if isinstance(value, Sequence) and not isinstance(value, _BYTES):
            return [self.encode(item) for item in value]
        if is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in fields(value) if field.init]
            return {name: self.encode(getattr(value, name)) for name in names}
        if _is_model(type(value)):
            return value.model_dump(mode="json", by_alias=True, round_trip=True)
        raise TypeError(
            f"the type {type(value).__name__} has no form in JSON: pass what identifies the "
            "value, such as an id, or give the registry a rota.Codec that knows the type"
        )

    def decoder(self, kind: Any) -> Decoder:
        """Return what makes a value of a type from JSON; raise TypeError for an unknown type.

        What it returns raises ValueError or TypeError for JSON of another form.
        """
        if (bare := _bare(kind)) is not kind:
            return self.decoder(bare)  # a subclass may know it
        origin, inner = get_origin(kind), get_args(kind)
        if kind is Any or kind is object:
            return _as_it_is
        if kind in (None, NoneType, bool, int, float, str):
            return partial(_plain, NoneType if kind is None else kind)
        if kind in _TEXTS:
            return partial(_text, _TEXTS[kind])
        if kind is timedelta:
            return _duration
        if origin in (Union, UnionType):
            # A model takes what was another with more fields; pydantic itself finds the best.
            models = [part for part in inner if inspect.isclass(part) and _is_model(part)]
            together = [_any_model(models)] if len(models) > 1 else []
            parts = [part for part in inner if not together or part not in models]
            _check_tells_apart([part for part in map(_bare, parts) if is_dataclass(part)])
            alone = [self.decoder(part) for part in sorted(parts, key=_width)]
            return partial(_first, together + alone)
        if origin is Literal:
            return partial(_literal, [(self.encode(choice), choice) for choice in inner])
        if is_typeddict(origin):
            raise TypeError(
                f"{kind} is a generic TypedDict: define one that has its types in their places"
            )
        if is_typeddict(kind):
            return partial(decode_object, dict, self._parts(kind), _required_keys(kind))
        if inspect.isclass(origin or kind):
            return self._decoder_of_class(kind, origin or kind, inner)
        raise _unknown(kind)

    def _decoder_of_class(self, kind: Any, plain: type, inner: tuple[Any, ...]) -> Decoder:
        if issubclass(plain, Enum):
            return partial(_member, plain, [(self.encode(each), each) for each in plain])
        if _is_model(plain):
            return lambda value: kind.model_validate_json(json.dumps(value))
        if is_dataclass(plain):
            required = {
                field.name
                for field in fields(plain)
                if field.init and field.default is MISSING and field.default_factory is MISSING
            }
            _check_keeps_all(plain)
            names = {field.name for field in fields(plain) if field.init}
            return partial(decode_object, plain, self._parts(plain, names), required)
        if plain is tuple and inner and inner[-1] is not Ellipsis:
            return partial(_tuple, [self.decoder(part) for part in inner])
        if issubclass(plain, Mapping) and issubclass(dict, plain):
            key, item = inner or (str, Any)
            # A key is a text, as which an int stands in JSON.
            return partial(_mapping, partial(_key_of, self.decoder(key)), self.decoder(item))
        for made in (list, tuple, set, frozenset):
            if issubclass(made, plain):
                return partial(_array, made, self.decoder(inner[0] if inner else Any))
        raise _unknown(kind)

    def _parts(self, kind: Any, names: Set[str] | None = None) -> dict[str, Decoder]:
        hints = hints_of(kind, kind.__name__)
        return {
            name: self.decoder(part)
            for name, part in hints.items()
            if names is None or name in names
        }


def misread(kind: Any, sent: Any, arrived: Any) -> tuple[Any, Any] | None:
    """Return what of a value arrives as another member of its union, or less, and as what."""
    with suppress(Exception):  # arrays say neither yes nor no
        if sent is arrived or sent == arrived:
            return None
    kind = _bare(kind)
    if get_origin(kind) in (Union, UnionType):
        if type(sent) in _choices_of(kind) - {type(arrived)}:
            return sent, arrived
        pairs = [(part, sent, arrived) for part in get_args(kind)]
    elif _is_model(type(sent)) and _is_model(type(arrived)):
        known = type(sent).model_fields
        lost = sent.model_fields_set - arrived.model_fields_set
        is_lost = any(name not in known or not known[name].exclude for name in lost)
        return (sent, arrived) if is_lost else None
    else:
        both = zip(_inside(kind, sent), _inside(kind, arrived), strict=False)
        pairs = [(part, one, other) for (part, one), (_, other) in both]
    return next(filter(None, (misread(*pair) for pair in pairs)), None)


def _choices_of(kind: Any) -> set[Any]:
    """Return the classes between which a union chooses, or the only one."""
    kind = _bare(kind)
    if get_origin(kind) in (Union, UnionType):
        return set().union(*map(_choices_of, get_args(kind)))
    return {get_origin(kind) or kind}


def _inside(kind: Any, value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a value, each with its type."""
    plain, inner, has_fields = get_origin(kind) or kind, get_args(kind), is_dataclass(kind)
    if has_fields and isinstance(value, plain):
        value = {part.name: getattr(value, part.name) for part in fields(plain) if part.init}
    if isinstance(value, Mapping) and (has_fields or is_typeddict(plain)):
        hints = hints_of(plain, plain.__name__)
        return [(hints.get(name), part) for name, part in value.items()]
    if isinstance(value, Mapping):
        return chain.from_iterable(zip(inner, item, strict=False) for item in value.items())
    if isinstance(value, Set):
        value = sorted(value, key=str)
    if not inner or isinstance(value, str) or not isinstance(value, Sequence):
        return ()
    is_of_places = plain is tuple and inner[-1] is not Ellipsis
    return zip(inner if is_of_places else repeat(inner[0]), value, strict=False)


def hints_of(owner: Any, name: str) -> dict[str, Any]:
    """Return the types in a class or function; raise TypeError for one that is not found."""
    try:
        return get_type_hints(owner, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"the types of {name} cannot be read: {error}; import or define them in its "
            "module, before it, and not under TYPE_CHECKING"
        ) from None


def _key(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"{value!r} cannot be a key of a JSON object: use a text or an int")
    return str(value)


def _required_keys(kind: Any) -> set[str]:
    # With annotations that are texts, a class does not see what is Required or NotRequired.
    required = set(kind.__required_keys__)
    for name, hint in hints_of(kind, kind.__name__).items():
        while _is_marked(hint):
            if get_origin(hint) is NotRequired:
                required.discard(name)
            elif get_origin(hint) is Required:
                required.add(name)
            hint = get_args(hint)[0]
    return required


def _check_keeps_all(kind: type) -> None:
    for name, hint in hints_of(kind, kind.__name__).items():
        if isinstance(hint, InitVar):
            raise TypeError(
                f"{kind.__name__} does not keep its InitVar {name}, and cannot be made again "
                "without it"
            )
    # Of a dataclass of pydantic, whose __init__ takes no name but the alias, and drops others.
    for name, field in getattr(kind, "__pydantic_fields__", {}).items():
        settings = kind.__pydantic_config__  # type: ignore[attr-defined]
        takes_names = settings.get("populate_by_name") or settings.get("validate_by_name")
        if field.validation_alias is not None and not takes_names:
            raise TypeError(
                f"{kind.__name__} is not made by the name of its field {name}, but by its "
                "alias: set populate_by_name in its config, or make it a BaseModel"
            )


def _check_tells_apart(kinds: Sequence[Any]) -> None:
    for one, other in combinations(kinds, 2):
        if _init_hints(one) == _init_hints(other):
            raise TypeError(
                f"{one.__name__} and {other.__name__} have the same fields, and in JSON "
                "nothing tells one from the other: give each a field such as "
                f"kind: Literal[{one.__name__!r}]"
            )


def _init_hints(kind: Any) -> dict[str, Any]:
    hints = hints_of(kind, kind.__name__)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _is_model(kind: type) -> bool:
    pydantic = sys.modules.get("pydantic")  # whoever has a model has imported it
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def _any_model(models: Sequence[Any]) -> Decoder:
    adapter = sys.modules["pydantic"].TypeAdapter(reduce(or_, models))
    return lambda value: adapter.validate_json(json.dumps(value))


def _unknown(kind: Any) -> TypeError:
    name = getattr(kind, "__name__", repr(kind))
    return TypeError(
        f"the type {name} has no form in JSON: take what identifies the value, such as an id, "
        "or give the registry a rota.Codec that knows the type"
    )


def _bare(kind: Any) -> Any:
    """Return the type that has another name, or something written on it."""
    if isinstance(kind, NewType):
        return _bare(kind.__supertype__)
    if type(kind).__name__ == "TypeAliasType":  # which `type` makes, from Python 3.12 on
        return _bare(kind.__value__)
    if _is_marked(kind):
        return _bare(get_args(kind)[0])
    return kind


def _is_marked(kind: Any) -> bool:
    mark = get_origin(kind)
    is_read_only = getattr(mark, "_name", None) == "ReadOnly"  # of typing, from Python 3.13 on
    return mark in (Annotated, Required, NotRequired) or is_read_only


def _width(kind: Any) -> tuple[int, int]:
    """Order the parts of a union: what takes most values comes last."""
    kind = _bare(kind)
    # A dataclass takes what was one of fewer fields, if it has defaults for the others.
    size = len(fields(kind)) if is_dataclass(kind) else 0
    origin = get_origin(kind) or kind
    wide = (datetime, bool, int, float, str, list, dict, Any, object)
    return wide.index(origin) + 1 if origin in wide else 0, size


def _as_it_is(value: Any) -> Any:
    return value


def _plain(kind: type, value: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"must be {'null' if kind is NoneType else kind.__name__}")
    return value


def _text(make: Callable[[str], Any], value: Any) -> Any:
    return make(_plain(str, value))


def _duration(value: Any) -> timedelta:
    return timedelta(seconds=_plain(float, value))


def _literal(choices: Sequence[tuple[Any, Any]], value: Any) -> Any:
    for encoded, choice in choices:
        if type(encoded) is type(value) and encoded == value:
            return choice
    raise ValueError(f"must be one of {', '.join(repr(encoded) for encoded, _ in choices)}")


def _member(kind: type[Enum], members: Sequence[tuple[Any, Enum]], value: Any) -> Any:
    found = next((each for encoded, each in members if encoded == value), None)
    return kind(value) if found is None else found  # which knows what else is one of them


def _key_of(decoder: Decoder, text: Any) -> Any:
    """Decode the text of a key; if it is not one of its type, as the number that it may be."""
    try:
        return decoder(text)
    except (ValueError, TypeError, ArithmeticError):
        if not _INTEGER.fullmatch(text):
            raise
        return decoder(int(text))


def _first(decoders: list[Decoder], value: Any) -> Any:
    said = []
    for decoder in decoders:
        try:
            return decoder(value)
        except (ValueError, TypeError, ArithmeticError) as error:
            said.append(str(error))
    raise ValueError("; or ".join(said))


def _array(make: Callable[[Any], Any], decoder: Decoder, value: Any) -> Any:
    items = enumerate(_plain(list, value))
    return make(decode(f"[{index}]", decoder, item) for index, item in items)


def _tuple(decoders: list[Decoder], value: Any) -> Any:
    if len(_plain(list, value)) != len(decoders):
        raise ValueError(f"must be an array of {len(decoders)}")
    items = enumerate(zip(decoders, value, strict=True))
    return tuple(decode(f"[{index}]", decoder, item) for index, (decoder, item) in items)


def _mapping(key: Decoder, decoder: Decoder, value: Any) -> Any:
    items = _plain(dict, value).items()
    return {
        decode(f"[{name!r}]", key, name): decode(f"[{name!r}]", decoder, item)
        for name, item in items
    }


def decode_object(
    make: Callable[..., Any], parts: Mapping[str, Decoder], required: Set[str], value: Any
) -> Any:
    """Call *make* with the decoded parts of an object; raise ValueError if they differ."""
    names = _plain(dict, value).keys()
    if unknown := names - parts.keys():
        raise ValueError(f"has the unknown {min(unknown)!r}")
    if missing := required - names:
        raise ValueError(f"lacks {min(missing)!r}")
    return make(**{name: decode(f".{name}", parts[name], value[name]) for name in names})


class _Misfit(ValueError):
    """A value inside of another is of another form; says where."""

    def __init__(self, path: str, said: str) -> None:
        super().__init__(f"{path} {said}")
        self.path = path
        self.said = said


def decode(path: str, decoder: Decoder, value: Any) -> Any:
    """Decode a part of a value; raise ValueError that names its place and shows it."""
    try:
        return decoder(value)
    except _Misfit as error:
        raise _Misfit(path + error.path, error.said) from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise _Misfit(path, f"{error}, got {repr(value)[:80]}") from None
