"""The exception tree: exact, drawn as it is, and the same on both sides of the wire."""

from __future__ import annotations

import re

import pytest

from charrm import errors
from charrm.errors import CharrmError, InvalidRow, error_from_kind


def tree(cls: type[CharrmError] = CharrmError) -> list[type[CharrmError]]:
    """The class and everything below it, parents first."""
    below = [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
    return [cls, *(found for sub in below for found in tree(sub))]


def drawn() -> dict[str, tuple[str, str | None]]:
    """Class -> (parent, kind or None) as the module's docstring draws them."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str, str | None]] = {}
    parents = ["CharrmError"]
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ((?:│   |    )*)[├└]── (\w+) +(.+)", line)
        if match is None:
            continue
        depth, name, text = len(match[1]) // 4, match[2], match[3].strip()
        parents[depth + 1 :] = [name]
        kind = text if re.fullmatch(r"[a-z]+(_[a-z]+)+|[a-z]+", text) else None
        found[name] = (parents[depth], kind)
    return found


def test_all_is_exact() -> None:
    names = {cls.__name__ for cls in tree()} | {"error_from_kind"}
    assert errors.__all__ == sorted(errors.__all__)
    assert set(errors.__all__) == names
    public = {n for n, v in vars(errors).items() if getattr(v, "__module__", "") == "charrm.errors"}
    assert public == names


def test_every_kind_is_its_own() -> None:
    kinds = [cls.kind for cls in tree()]
    assert len(set(kinds)) == len(kinds)
    assert all("kind" in vars(cls) for cls in tree())


def test_the_docstring_draws_the_tree() -> None:
    pictured = drawn()
    assert pictured.keys() == {cls.__name__ for cls in tree()} - {"CharrmError"}
    for cls in tree()[1:]:
        parent, kind = pictured[cls.__name__]
        assert cls.__base__ is not None
        assert cls.__base__.__name__ == parent
        assert kind == (None if cls.__subclasses__() else cls.kind)


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_an_error_survives_the_wire(cls: type[CharrmError]) -> None:
    error = error_from_kind(cls.kind, "profile: missing")
    assert type(error) is cls
    assert (error.message, str(error)) == ("profile: missing", "profile: missing")


def test_an_unknown_kind_is_kept_in_the_message() -> None:
    error = error_from_kind("from_the_future", "what happened")
    assert type(error) is CharrmError
    assert error.message == "from_the_future: what happened"
    assert type(error_from_kind("invalid_row", "")) is InvalidRow  # the control
