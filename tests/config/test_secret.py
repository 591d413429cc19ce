"""A secret is in the configuration, and nowhere that shows one."""

import copy
import logging
import pickle
from typing import Any

import msgspec
import pytest

from ha.config import SecretStr
from ha.config.check import accepted, check_bounds, fields, parse
from ha.config.loading import render

WORD = "correct horse battery staple"


class Keeper(msgspec.Struct, frozen=True, kw_only=True):
    password: SecretStr | None = msgspec.field(name="some.password", default=None)
    name: str = "keeper"


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r:>40}".format, "%s".__mod__, ascii])
def test_showing_it_shows_nothing(show: Any) -> None:
    assert WORD not in show(SecretStr(WORD))
    assert WORD not in show(Keeper(password=SecretStr(WORD)))


def test_revealing_it_is_the_only_way() -> None:
    assert SecretStr(WORD).reveal() == WORD
    for take in (msgspec.json.encode, msgspec.to_builtins, pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError) as caught:
            take(Keeper(password=SecretStr(WORD)))
        assert WORD not in str(caught.value)


def test_compares_by_what_it_holds() -> None:
    assert SecretStr(WORD) == SecretStr(WORD)
    assert SecretStr(WORD) != SecretStr(WORD + " ")
    assert SecretStr(WORD) != WORD
    assert len({SecretStr("a"), SecretStr("a"), SecretStr("b")}) == 2
    assert not SecretStr("")


def test_is_a_value_of_the_configuration() -> None:
    kind = fields(Keeper)["some.password"].type
    assert parse("some.password", kind, WORD) == SecretStr(WORD)
    assert accepted(kind) == "text, which is never displayed"
    assert check_bounds(Keeper(password=SecretStr(WORD))) == []


def test_a_bare_text_in_its_place_is_refused_unshown() -> None:
    (error,) = check_bounds(Keeper(password=WORD))  # type: ignore[arg-type]
    assert error.key == "some.password"
    assert WORD not in str(error)


def test_print_config_says_that_there_is_one() -> None:
    assert render(Keeper(password=SecretStr(WORD))) == "some.password=***\nname=keeper\n"  # type: ignore[arg-type]


def test_a_log_line_hides_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logging.getLogger("ha.test").info("config=%s password=%s", Keeper(password=SecretStr(WORD)), SecretStr(WORD))
    assert WORD not in caplog.text
