"""Loads the Lua scripts as one library of functions, reads their headers, and refuses what does not hold together.

A library of functions is run once, when the server loads it, and then called; a script runs from its first line each
time, and making its functions anew costs the server more than the commands that it carries out.

A script's header is its contract; what it says is available as values, so that the codec and the tests can be held
to it. The first line is the promise. Then, in this order::

    --[[
      Lease one permit of an endpoint, or say why not and for how long.
      Guarantees: a refusal takes nothing from anybody.
      KEYS[1] root             all keys of the guard begin with it
      ARGV[1] now_ms           "" for the server's time
      ARGV[2...] lease         any number of these; only the last one can be so
      Reply: {status, value}, integers
         0 ADMITTED            expires_at_ms
        -1 ENDPOINT_FULL       retry_after_ms
    ]]
    --- @include "now"

    local function admit()
      ...
    end

Any other line goes on with the text above it. An include stands in for its file under ``include/``, once in the
library, however often it is asked for. A script defines a function of its own name, which takes its keys and arguments
from `start` in ``include/state``. Nothing is stripped: what an error names by line can be read with ``--write``.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from guard_middleware.errors import GuardError

if TYPE_CHECKING:
    from collections.abc import Sequence

LUA = Path(__file__).with_name("lua")
"""Folder of the scripts; what they share is in ``include`` under it."""

_HEADER = re.compile(r"--\[\[\n(?P<text>.*?)\n[ \t]*\]\]", re.DOTALL)
_ENTRY = re.compile(r"(?P<kind>KEYS|ARGV)\[(?P<number>\d+)(?P<rest>\.\.\.)?\] +(?P<name>[a-z][a-z0-9_]*)(?: .*)?")
_REPLY = re.compile(r"(?P<code>-?\d+) +(?P<name>[A-Z][A-Z0-9_]*)(?: .*)?")
_INCLUDE = re.compile(r'--- @include "(?P<name>[a-z][a-z0-9_]*)"')
_USE = re.compile(r"\b(?P<kind>KEYS|ARGV)\[(?P<number>\d+)\]")
_COMMENT = re.compile(r"--\[\[.*?\]\]|--[^\n]*", re.DOTALL)

_REGISTER = """\
redis.register_function{{
  function_name = "{function}",
  callback = function(keys, args)
    start(keys, args)
    return {script}()
  end,
  flags = {{ {flags} }},
}}
"""
_READERS = frozenset({"snapshot"})
_NO_WRITES = '"no-writes"'
"""Served also by a server that is out of memory, or that is a replica."""

_PROMISE, _GUARANTEES, _KEYS, _ARGV, _REPLIES = range(5)


class ScriptError(GuardError):
    """A Lua script of this package is missing, or does not hold together: the package is broken, not its use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One Lua script, and what its header says about it.

    Attributes:
        name: its file's name, without ``.lua``.
        source: the text, with its includes.
        keys: names of ``KEYS[1]``, ``KEYS[2]``, ... A last one that stands for any number ends in ``...``.
        args: names of ``ARGV[1]``, ``ARGV[2]``, ... likewise.
        replies: status code to name.
    """

    name: str
    source: str = field(repr=False)
    keys: tuple[str, ...]
    args: tuple[str, ...]
    replies: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """All scripts as they go to the server.

    Attributes:
        name: of the library. It changes with the text, so that several versions of it can be in one server.
        source: the text.
        functions: script -> name of its function, which is known all over the server.
    """

    name: str
    source: str = field(repr=False)
    functions: dict[str, str]


@cache
def library(folder: Path = LUA) -> Library:
    """Assemble the library of all scripts. The second call returns the same object.

    Args:
        folder: where the scripts are; tests have their own.

    Raises:
        ScriptError: as `load`.
    """
    seen: set[Path] = set()
    text = "".join(_expand(folder / f"{name}.lua", (), seen) for name in names(folder))
    name = f"guard_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    functions = {script: f"{name}_{script}" for script in names(folder)}
    registered = "".join(
        _REGISTER.format(function=function, script=script, flags=_NO_WRITES if script in _READERS else "")
        for script, function in functions.items()
    )
    return Library(name=name, source=f"#!lua name={name}\n{text}\n{registered}", functions=functions)


def names(folder: Path = LUA) -> tuple[str, ...]:
    """The scripts that there are, in alphabetical order."""
    return tuple(sorted(path.stem for path in folder.glob("*.lua")))


@cache
def load(name: str, folder: Path = LUA) -> Script:
    """Assemble a script and read its header. The second call returns the same object.

    Args:
        name: the file's name, without ``.lua``.
        folder: where it is; tests have their own.

    Raises:
        ScriptError: if the file or an include is missing, includes go in a circle, or the header is missing,
            malformed, leaves a number out, or says less than the code uses.
    """
    source = assemble(name, folder)
    try:
        keys, args, replies = _parse(_header(source))
        _check_uses(source, {"KEYS": keys, "ARGV": args})
        _check_function(source, name)
    except _MalformedError as exc:
        msg = f"{folder / name}.lua: {exc}"
        raise ScriptError(msg) from None
    return Script(name=name, source=source, keys=keys, args=args, replies=replies)


# ---------------------------------------------------------------------- includes


def assemble(name: str, folder: Path = LUA) -> str:
    """The text of a script with its includes in it, nothing else changed.

    Raises:
        ScriptError: if the file or an include is missing, or includes go in a circle.
    """
    return _expand(folder / f"{name}.lua", (), set())


def _expand(path: Path, above: tuple[Path, ...], seen: set[Path]) -> str:
    """One file's text with its includes. `above` are the files that are being expanded, `seen` those that were."""
    if path in above:
        circle = " > ".join(file.stem for file in (*above[above.index(path) :], path))
        msg = f"{path}: includes go in a circle: {circle}"
        raise ScriptError(msg)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        asked = f", which {above[-1]} includes" if above else ""
        there = ", ".join(sorted(file.stem for file in path.parent.glob("*.lua"))) or "none"
        msg = f"there is no {path}{asked}; there are: {there}"
        raise ScriptError(msg) from None
    includes = (above[0] if above else path).parent / "include"
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        lines.append(line)
        if not re.match(r"\s*-+ *@include", line):
            continue
        match = _INCLUDE.fullmatch(line)
        if match is None:
            msg = f'{path}:{number}: an include is a line of its own, --- @include "name", not {line.strip()!r}'
            raise ScriptError(msg)
        included = includes / f"{match['name']}.lua"
        if included not in seen:
            lines.append(_expand(included, (*above, path), seen).removesuffix("\n"))
            seen.add(included)
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- header


class _MalformedError(Exception):
    """What is wrong with a script, without its name."""


def _header(source: str) -> list[str]:
    """The lines of the block comment that opens the script."""
    match = _HEADER.match(source)
    if match is None:
        msg = "no header: begin with --[[ on a line, then the promise, Guarantees:, KEYS[n], ARGV[n], Reply:, then ]]"
        raise _MalformedError(msg)
    return [line.strip() for line in match["text"].splitlines() if line.strip()]


def _parse(lines: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], dict[int, str]]:
    """The names of keys and arguments, and the codes of the replies."""
    if not lines or _opens(lines[0]) is not None:
        msg = "the header's first line is the script's promise"
        raise _MalformedError(msg)
    entries: dict[str, list[str]] = {"KEYS": [], "ARGV": []}
    replies: dict[int, str] = {}
    section, seen = _PROMISE, {_PROMISE}
    for line in lines:
        opened = _opens(line)
        if opened in (_KEYS, _ARGV):
            _add_entry(line, entries)
        elif opened is None and section == _REPLIES and re.match(r"[-+]?\d", line):
            _add_reply(line, replies)
        if opened is not None:
            if opened < section or (opened in seen and opened in (_GUARANTEES, _REPLIES)):
                msg = f"out of place: {line!r}; the order is promise, Guarantees:, KEYS, ARGV, Reply:"
                raise _MalformedError(msg)
            section = opened
            seen.add(opened)
    for needed, title in ((_GUARANTEES, "Guarantees:"), (_REPLIES, "Reply:")):
        if needed not in seen:
            msg = f"the header has no line that begins with {title}"
            raise _MalformedError(msg)
    return tuple(entries["KEYS"]), tuple(entries["ARGV"]), replies


def _opens(line: str) -> int | None:
    """The section that a line opens or, of keys and arguments, goes on with; `None` for the text of the present one."""
    for section, start in ((_GUARANTEES, "Guarantees:"), (_KEYS, "KEYS["), (_ARGV, "ARGV["), (_REPLIES, "Reply:")):
        if line.startswith(start):
            return section
    return None


def _add_entry(line: str, entries: dict[str, list[str]]) -> None:
    match = _ENTRY.fullmatch(line)
    if match is None:
        msg = f"malformed: {line!r}; write it as in ARGV[1] now_ms  what it is"
        raise _MalformedError(msg)
    kind, known = match["kind"], entries[match["kind"]]
    if known and known[-1].endswith("..."):
        msg = f"{line!r} comes after {known[-1]!r}, which takes all that follow"
        raise _MalformedError(msg)
    if int(match["number"]) != len(known) + 1:
        msg = f"{line!r} should be {kind}[{len(known) + 1}]: numbers go up from 1 and leave none out"
        raise _MalformedError(msg)
    if match["name"] in known:
        msg = f"{line!r}: there is a {kind} of that name already"
        raise _MalformedError(msg)
    known.append(match["name"] + (match["rest"] or ""))


def _add_reply(line: str, replies: dict[int, str]) -> None:
    match = _REPLY.fullmatch(line)
    if match is None:
        msg = f"malformed: {line!r}; write a reply as in -1 ENDPOINT_FULL  retry_after_ms"
        raise _MalformedError(msg)
    code = int(match["code"])
    if code in replies or match["name"] in replies.values():
        msg = f"{line!r}: there is a reply of that code or name already"
        raise _MalformedError(msg)
    replies[code] = match["name"]


def _check_function(source: str, name: str) -> None:
    """Refuse a script that does not define what the library registers."""
    if not re.search(rf"^local function {re.escape(name)}\(\)$", source, re.MULTILINE):
        msg = f"no function of the script's own name: define it by the line local function {name}()"
        raise _MalformedError(msg)


def _check_uses(source: str, entries: dict[str, tuple[str, ...]]) -> None:
    """Refuse code that reads a key or an argument of which the header does not speak."""
    for match in _USE.finditer(_COMMENT.sub("", source)):
        known = entries[match["kind"]]
        if not 1 <= int(match["number"]) <= len(known) and not (known and known[-1].endswith("...")):
            msg = f"the code uses {match[0]}, which the header does not list"
            raise _MalformedError(msg)


# ---------------------------------------------------------------------- for luacheck


def write(target: Path, folder: Path = LUA) -> Path:
    """Write the library into a folder, for luacheck and for reading; other ``.lua`` files in it go away.

    It begins as for the server, but for the name of the library, which is no Lua, behind a comment.

    Args:
        target: the folder to write into; it is made if need be.
        folder: where the scripts are.

    Returns:
        The file.

    Raises:
        ScriptError: as `load`.
    """
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.lua"):
        old.unlink()
    path = target / "guard.lua"
    path.write_text(f"-- {library(folder).source}", encoding="utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Check all scripts, and write them assembled if asked to."""
    parser = argparse.ArgumentParser(prog="python -m guard_middleware.store.scripts", description=main.__doc__)
    parser.add_argument("--write", type=Path, metavar="DIR", help="folder for the assembled scripts")
    options = parser.parse_args(arguments)
    if options.write is not None:
        write(options.write)
    for name in names():
        script = load(name)
        counts = f"{len(script.keys)} keys, {len(script.args)} arguments, {len(script.replies)} replies"
        print(library().functions[name], counts)  # noqa: T201  # a command's output


if __name__ == "__main__":
    main()
