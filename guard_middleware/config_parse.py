"""From the texts of an environment to values, and from what is wrong with them to words.

Each refusal says what to write instead and never repeats the value, which may hold a key or a password (I13). Only
what names something is repeated: variables, fields, ids of endpoints and groups.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

from pydantic import BeforeValidator, Secret, SecretStr
from pydantic_core import PydanticCustomError

from guard_middleware.config_url import redact_url, redis_url_problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from pydantic import ValidationError

LONGEST_NAME = 200
LARGEST = 100_000
"""No count of anything is larger; ceilings and costs are bounded far lower, by MODEL_MAX_CONCURRENCY."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][+-]?[0-9]{1,3})?")
_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_CONTROL = {"Cc", "Cs", "Zl", "Zp"}
_LONGEST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the configuration.

    Attributes:
        path: the variable or keyword, then the keys and indexes that lead to the field.
        text: what is wrong and what to do, following on "<path> ".
    """

    path: tuple[str | int, ...]
    text: str

    def __str__(self) -> str:
        """One line of the message."""
        return f"{shown_path(self.path)} {self.text}"


def message(problems: Collection[Problem]) -> str:
    """Everything that is wrong, in one text, one line for each problem."""
    lines = dict.fromkeys(str(problem) for problem in problems)
    count = f"{len(lines)} problems" if len(lines) > 1 else "1 problem"
    return f"the configuration of the guard is refused, {count}:" + "".join(f"\n  - {line}" for line in lines)


def shown_path(path: tuple[str | int, ...]) -> str:
    """Spell a path as one would in code: ``GUARD_MODELS[1].role``, ``GPU_CONCURRENCY_BUDGETS["10.0.0.5"]``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _NAME.fullmatch(step):
            text += f".{step}" if text else step
        elif step != "[key]":  # pydantic's mark for "the key itself is wrong"
            text += f"[{shown(step)}]"
    return text


def shown(name: str) -> str:
    """Quote a name for people: escaped, shortened, and hidden as far as it is a URL with credentials."""
    safe = redact_url(name) if "://" in name else name
    safe = safe if len(safe) <= _LONGEST_SHOWN else safe[:_LONGEST_SHOWN] + "..."
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in safe)
    return f'"{escaped}"'


def unknown(path: tuple[str | int, ...], key: str, text: str) -> Problem:
    """A problem with a field that does not exist. Its name is repeated only if no key or URL is spelled like it."""
    if _NAME.fullmatch(key):
        return Problem((*path, key), text)
    return Problem(path, f"has a field whose name is not shown here; it {text}")


def nearest(name: str, names: Iterable[str], cutoff: float = 0.0) -> str | None:
    """The one of `names` that looks most like `name`, whatever the case; ``None`` if none is as close as `cutoff`."""
    by_folded = {known.casefold(): known for known in names}
    found = get_close_matches(name.casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[found[0]] if found else None


def refuse(text: str) -> NoReturn:
    """Tell pydantic that a value is wrong, in our words, which follow on "<path> "."""
    kind, template = "refused", "{text}"
    raise PydanticCustomError(kind, template, {"text": text})


def problems_in(error: ValidationError, root: tuple[str | int, ...] = ()) -> Iterator[Problem]:
    """Translate pydantic's errors. Its own texts and the input that it holds are left behind.

    Args:
        error: as raised by pydantic.
        root: path of the thing that was validated.
    """
    for item in error.errors(include_url=False, include_input=False):
        path = root + tuple(item["loc"])
        match item["type"]:
            case "refused":
                yield Problem(path, item["msg"])
            case "missing":
                yield Problem(path, "is missing: write it")
            case kind:
                yield Problem(path, f"holds a kind of value that is not accepted here ({kind})")


def whole(low: int, high: int = LARGEST, *, zero: str = "") -> BeforeValidator:
    """Accept a whole number, also as digits in a text; no boolean, no fraction, nothing out of range.

    Args:
        low: least accepted.
        high: largest accepted.
        zero: what to say to somebody who wrote 0, who meant something by it.
    """

    def read(value: object) -> int:
        text = value.strip() if isinstance(value, str) else ""
        number = int(text) if _WHOLE.fullmatch(text) else value
        # `isinstance(True, int)` holds, and a ceiling of `true` is a mistake, not a ceiling of 1.
        if isinstance(number, bool) or not isinstance(number, int):
            refuse(f"must be a whole number from {low} to {high}, without a point")
        if not low <= number <= high:
            hint = f"; {zero}" if zero and number == 0 else ""
            refuse(f"must be a whole number from {low} to {high}{hint}")
        return number

    return BeforeValidator(read)


def number(low: float, high: float, *, open_end: bool = False) -> BeforeValidator:
    """Accept a finite number, also as a decimal text; no boolean, nothing out of range.

    Args:
        low: least accepted.
        high: largest accepted.
        open_end: whether `high` itself is refused.
    """
    bounds = f"from {low:g} to {'below ' if open_end else ''}{high:g}"

    def read(value: object) -> float:
        text = value.strip() if isinstance(value, str) else ""
        number = float(text) if _NUMBER.fullmatch(text) else value
        if isinstance(number, bool) or not isinstance(number, int | float):
            refuse(f"must be a number {bounds}, written in digits")
        # NaN is in no range, so it ends here as well.
        if not low <= number <= high or (open_end and number == high):
            refuse(f"must be a number {bounds}")
        return float(number)

    return BeforeValidator(read)


def truth() -> BeforeValidator:
    """Accept ``true`` or ``false``, and as a text also yes/no, on/off, 1/0."""

    def read(value: object) -> bool:
        word = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
        if not isinstance(word, bool):
            refuse("must be true or false")
        return word

    return BeforeValidator(read)


def one_of(*words: str) -> BeforeValidator:
    """Accept one of a few words, whatever its case."""

    def read(value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in words:
            refuse(f"must be {' or '.join(words)}")
        return word

    return BeforeValidator(read)


def name(*, forbidden: str = "", optional: bool = False, folded: bool = False) -> BeforeValidator:
    """Accept the name of something: 1 to 200 characters of any script, slash, colon, dot and inner space included.

    It becomes part of keys, labels and log lines, hence: no control character or line break, no space at its ends,
    and no credentials. Case matters.

    Args:
        forbidden: characters that are refused.
        optional: whether an empty text stands for "none".
        folded: whether case does not matter; then the result is in lower case.
    """

    def read(value: object) -> str:
        wrong = name_problem(value, forbidden)
        if wrong and not (optional and value == ""):
            refuse(wrong)
        return str(value).lower() if folded else str(value)

    return BeforeValidator(read)


def name_problem(value: object, forbidden: str = "") -> str | None:
    """What is wrong with a name, in words that repeat nothing of it; ``None`` if nothing."""
    if not isinstance(value, str):
        return "must be a text in double quotes"
    if not value.strip():
        return "is empty: give it a name"
    if len(value) > LONGEST_NAME:
        return f"is longer than {LONGEST_NAME} characters: shorten it"
    if any(unicodedata.category(char) in _CONTROL for char in value):
        return "holds a line break or a control character: remove it"
    if value != value.strip():
        return "begins or ends with a space: remove it"
    if "://" in value and "@" in value.partition("://")[2]:
        return "holds the credentials of a URL, and names are logged: choose a name without them"
    if any(char in value for char in forbidden):
        return f"holds one of the characters {' '.join(forbidden)}: choose a name without them"
    return None


class Unchangeable:
    """Refuses assignments itself: pydantic's own error about a frozen model repeats the value."""

    def __setattr__(self, field: str, value: object) -> None:
        """Let only private attributes be set, by pydantic.

        Raises:
            AttributeError: for every other one.
        """
        if not field.startswith("_"):
            msg = f"{type(self).__name__}.{field} is frozen: make a new one instead"
            raise AttributeError(msg)
        super().__setattr__(field, value)


class SecretUrl(Secret[str]):
    """A URL that is shown without its credentials. `get_secret_value` returns it whole."""

    def _display(self) -> str:
        return redact_url(self.get_secret_value())


def url_of_redis() -> BeforeValidator:
    """Accept the URL of a Redis, also as one of pydantic's secrets."""

    def read(value: object) -> str:
        text = value.get_secret_value() if isinstance(value, Secret | SecretStr) else value
        if not isinstance(text, str):
            refuse("must be a text")
        wrong = redis_url_problem(text)
        if wrong:
            refuse(wrong)
        return text

    return BeforeValidator(read)
