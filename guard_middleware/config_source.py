"""Where the settings come from, and the texts of the environment brought into the shape that the fields expect."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guard_middleware.config_endpoint import Entry, read_entries
from guard_middleware.config_json import Unreadable, parse_json
from guard_middleware.config_parse import Problem, nearest, shown, unknown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

_MODELS, _FILE = "GUARD_MODELS", "GUARD_MODELS_FILE"
_BUDGETS, _ROLES, _IGNORED = "GPU_CONCURRENCY_BUDGETS", "GPU_RESERVED_ROLES", "GUARD_IGNORE_VARIABLES"
_ALSO_CALLED = {
    "ceiling": "model_max_concurrent_requests",
    "budgets": "gpu_concurrency_budgets",
    "circuit_breaker": "model_circuit_breaker",
    "breaker": "model_circuit_breaker",
    "endpoints": "models",
    "reserve": "kg_llm_priority_reserve",
    "timeout": "store_timeout_s",
    "url": "redis_url",
}
"""What people call these settings elsewhere, so that the nearest name is the one they are looking for."""
_OWN_PREFIX = "GUARD_"
_SHARED_PREFIXES = ("MODEL_", "GPU_", "KG_")
_RESEMBLES = 0.85
_ALIKE = 0.6
_PLAIN_PATH = re.compile(r"[\w./\\: ~+-]{1,200}")
_SERVICE_LINK = re.compile(r"GUARD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""What Kubernetes puts into every container for a service whose name begins with "guard"."""


def environment(variables: Iterable[str], keywords: Collection[str]) -> dict[str, Any]:
    """What the environment says. A blank variable counts as not set, and spaces around a value do not count.

    Args:
        variables: to look for.
        keywords: variables that were given in Python instead. If the models are among them, in either way, then both
            variables that could name the models are passed over.
    """
    passed_over = {_MODELS, _FILE} if {_MODELS, _FILE}.intersection(keywords) else set()
    found = {variable: os.environ.get(variable, "").strip() for variable in variables if variable not in passed_over}
    return {variable: value for variable, value in found.items() if value}


def read_values(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Entry], list[Problem]]:
    """Parse what is JSON or a list, and the models with it.

    Args:
        data: merged values of all sources, by variable.

    Returns:
        The values for the fields, without those that could not be read; the members of the list of models; what is
        wrong so far.
    """
    values = dict(data)
    problems: list[Problem] = []
    for variable, read in ((_BUDGETS, _read_budgets), (_ROLES, _read_list), (_IGNORED, _read_list)):
        if variable in values:
            try:
                values[variable] = read(values[variable])
            except Unreadable as wrong:
                del values[variable]
                problems.append(Problem((variable,), str(wrong)))
    entries, wrong_entries = _read_models(values)
    values[_MODELS] = tuple(entry.endpoint for entry in entries if entry.endpoint is not None)
    return values, entries, problems + wrong_entries


def unknown_keyword(key: str, variables: Mapping[str, str]) -> Problem:
    """A keyword of the settings that does not exist, with the nearest that does.

    Args:
        key: as given.
        variables: of all settings, by their names in Python.
    """
    close = nearest(key, (*variables, *_ALSO_CALLED)) or ""
    return unknown(("GuardSettings",), key, f"is not a setting; the nearest is {_ALSO_CALLED.get(close, close)}")


def without(values: dict[str, Any], problems: Iterable[Problem]) -> dict[str, Any]:
    """The values without what was refused; of the budgets, only the refused members are left out."""
    kept = dict(values)
    for problem in problems:
        variable, *inside = problem.path
        if variable == _BUDGETS and inside:
            kept[_BUDGETS] = {group: budget for group, budget in kept[_BUDGETS].items() if group != inside[0]}
        else:
            kept.pop(str(variable), None)
    return kept


def stray_variables(names: Iterable[str], known: Collection[str], ignored: Collection[str]) -> Iterator[Problem]:
    """Variables that somebody set for the guard and that it would never read.

    ``GUARD_`` is ours, so anything unknown under it is refused. Other programs may own ``MODEL_``, ``GPU_`` and
    ``KG_``, so there only a slip of the pen is.

    Args:
        names: of all variables of the environment.
        known: the variables of the settings.
        ignored: variables that are meant to be there.
    """
    for variable in names:
        # Compared in capitals, as a variable in small letters is one more way to be ignored without a word.
        folded = variable.upper()
        if variable in known or variable in ignored or _SERVICE_LINK.fullmatch(folded):
            continue
        ours, close = folded.startswith(_OWN_PREFIX), None
        if ours:  # the prefix, which they share, makes nobody alike
            rests = {one.removeprefix(_OWN_PREFIX): one for one in known}
            close = rests.get(nearest(folded.removeprefix(_OWN_PREFIX), rests, _ALIKE) or "")
        elif folded.startswith(_SHARED_PREFIXES):
            close = nearest(variable, known, _RESEMBLES)
        if ours or close:
            advice = f"; the nearest is {close}: rename it, remove it" if close else ": remove it"
            text = f"is a variable that the guard does not know{advice}"
            yield Problem((variable,), f"{text}, or name it in {_IGNORED} if it is another program's")


def _read_json(value: object, empty: object, file_variable: str = "") -> object:
    if not isinstance(value, str):
        return value
    if not value.strip():
        return empty
    parsed = parse_json(value, file_variable=file_variable)
    if isinstance(parsed, str):
        text = "is JSON inside a JSON text: remove the quotes around it and the backslashes in it"
        raise Unreadable(text)
    return parsed


def _read_budgets(value: object) -> dict[str, object]:
    parsed = _read_json(value, {})
    if not isinstance(parsed, Mapping):
        text = 'must be a JSON object from GPU group to a number of calls, such as {"gb10": 40}'
        raise Unreadable(text)
    return {str(group): budget for group, budget in parsed.items()}


def _read_list(value: object) -> tuple[object, ...]:
    if isinstance(value, str) and not value.strip().startswith(("[", "{", '"', "'")):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    parsed = _read_json(value, ())
    if not isinstance(parsed, list | tuple | set | frozenset):
        text = "must be a list: words with commas between them, or JSON in brackets"
        raise Unreadable(text)
    return tuple(parsed)


def _read_models(values: dict[str, Any]) -> tuple[list[Entry], list[Problem]]:
    given, file = values.get(_MODELS, ()), values.get(_FILE)
    variable = _MODELS if file is None else _FILE
    if file is not None and _MODELS in values:
        return [], [Problem((_FILE,), f"and {_MODELS} are both set: keep one of them")]
    try:
        models = _read_json(given, [], _FILE) if file is None else _read_json(_content(file), None)
    except Unreadable as wrong:
        return [], [Problem((variable,), str(wrong))]
    return read_entries(variable, models)


def _content(file: object) -> str:
    """The text of the file of models. Only what is plainly a path is repeated: the models may stand there."""
    wrong, text = "", ""
    try:
        text = Path(str(file)).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        wrong = "names a file that is not UTF-8: save it as UTF-8"
    except (OSError, ValueError):
        named = f", {shown(str(file))}" if _PLAIN_PATH.fullmatch(str(file)) and "://" not in str(file) else ""
        wrong = f"names a file that cannot be read{named}: check that the path exists, seen from the working directory"
        if str(file).lstrip()[:1] in {"[", "{"}:
            wrong = f"must be a path; models as JSON go into {_MODELS}"
    else:
        if not text.strip("\ufeff \t\r\n"):
            wrong = "names an empty file: write [] into it for no models"
    if wrong:
        raise Unreadable(wrong)
    return text
