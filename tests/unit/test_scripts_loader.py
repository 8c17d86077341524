"""The Lua loader: what it puts together, what it reads from a header, and what it refuses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from guard_middleware.store import scripts
from guard_middleware.store.scripts import Script, ScriptError, library, load, names

HEADER = """\
--[[
  Lease one permit, or say why not
  and for how long.
  Guarantees: live leases never outnumber the limit;
    a refusal takes nothing from anybody.
  KEYS[1] root             all keys of the guard
                           begin with it
  KEYS[2] dramatiq         its namespace
  ARGV[1] now_ms           "" for the server's time; only tests pass a number
  ARGV[2] cost
  Reply: {status, value}, integers
     0 ADMITTED            expires_at_ms
    -1 ENDPOINT_FULL       retry_after_ms
   -12 PAUSED
]]
"""
BODY = "local function admit()\n  return {0, KEYS[1] .. KEYS[2] .. ARGV[1] .. ARGV[2]}\nend\n"
START = "local KEYS, ARGV\nlocal function start(keys, args)\n  KEYS, ARGV = keys, args\nend\n"


@pytest.fixture
def lua(tmp_path):
    """Write files into a folder of scripts: ``lua(admit=..., include_now=...)``; answers with the folder."""

    def write(**files):
        (tmp_path / "include").mkdir(exist_ok=True)
        for name, text in files.items():
            folder, stem = (tmp_path / "include", name[8:]) if name.startswith("include_") else (tmp_path, name)
            (folder / f"{stem}.lua").write_text(text)
        return tmp_path

    return write


def with_line(old, new):
    """The header with one line put differently."""
    assert old in HEADER
    return HEADER.replace(old, new) + BODY


def test_header_is_read(lua):
    """Keys, arguments and replies come from the header, each by its number and name; the rest is for people."""
    script = load("admit", lua(admit=HEADER + BODY))
    assert script.name == "admit"
    assert script.keys == ("root", "dramatiq")
    assert script.args == ("now_ms", "cost")
    assert script.replies == {0: "ADMITTED", -1: "ENDPOINT_FULL", -12: "PAUSED"}


def test_source_is_the_file(lua):
    """Nothing is stripped."""
    assert load("admit", lua(admit=HEADER + BODY)).source == HEADER + BODY


def test_library_is_called_by_its_functions(lua, valkey):
    """The server loads all scripts at once, and carries each out by its own name."""
    finish = (
        '--[[\n  Say hello.\n  Guarantees: none.\n  Reply: a text\n]]\nlocal function finish()\n  return "hello"\nend\n'
    )
    found = library(lua(admit=HEADER + '--- @include "start"\n' + BODY, finish=finish, include_start=START))
    assert valkey.call("FUNCTION", "LOAD", found.source) == found.name.encode()
    assert valkey.call("FCALL", found.functions["admit"], 2, "a", "b", "c", "d") == [0, b"abcd"]
    assert valkey.call("FCALL", found.functions["finish"], 0) == b"hello"


def test_versions_of_the_library_live_side_by_side(lua, valkey):
    """A change in a shared part is another library: old and new workers run at once."""
    folder = lua(admit=HEADER + '--- @include "start"\n' + BODY, include_start=START)
    before = library(folder)
    lua(include_start="-- better\n" + START)
    library.cache_clear()
    after = library(folder)
    assert {before.name, *before.functions.values()}.isdisjoint({after.name, *after.functions.values()})
    for one in (before, after):
        assert valkey.call("FUNCTION", "LOAD", one.source) == one.name.encode()
        assert valkey.call("FCALL", one.functions["admit"], 2, "a", "b", "c", "d") == [0, b"abcd"]


def test_shared_part_is_in_the_library_once(lua):
    """Whichever script asks for it first."""
    folder = lua(
        admit=HEADER + '--- @include "start"\n' + BODY,
        beat=HEADER + '--- @include "start"\n' + BODY.replace("admit", "beat"),
        include_start=START,
    )
    assert library(folder).source.count("local function start") == 1


def test_script_is_frozen_and_cached(lua):
    """A script is read once and cannot be changed; its repr does not hold the source."""
    folder = lua(admit=HEADER + BODY)
    script = load("admit", folder)
    assert load("admit", folder) is script
    with pytest.raises(FrozenInstanceError):
        script.name = "other"
    assert "return" not in repr(script)


def test_script_needs_neither_keys_nor_arguments_nor_codes(lua):
    """A script that takes nothing and answers with free text says so by leaving the rows out."""
    script = load(
        "list",
        lua(
            list='--[[\n  Say hello.\n  Guarantees: none.\n  Reply: a text\n]]\nlocal function list()\n  return "hello"\nend\n'
        ),
    )
    assert (script.keys, script.args, script.replies) == ((), (), {})


def test_last_argument_may_stand_for_any_number(lua):
    """A trailing ``ARGV[n...]`` is listed with its dots, and the code may use any number from there on."""
    header = with_line("  ARGV[2] cost\n", "  ARGV[2...] lease   any number of them\n")
    script = load("beat", lua(beat=header + "local a = ARGV[9]\nlocal function beat()\nend\n"))
    assert script.args == ("now_ms", "lease...")


# ---------------------------------------------------------------------- includes


def test_include_stands_where_it_is_asked_for(lua):
    """An include's text follows its line, in place, and the file ends with one line break."""
    folder = lua(admit=HEADER + '--- @include "now"\n' + BODY, include_now="local now = 1\n")
    assert load("admit", folder).source == HEADER + '--- @include "now"\nlocal now = 1\n' + BODY


def test_include_nested_comes_first_and_once(lua):
    """What an include needs comes before it, and nothing comes twice, whoever asks for it."""
    folder = lua(
        admit=HEADER + '--- @include "sweep"\n--- @include "now"\n' + BODY,
        include_sweep='--- @include "keys"\n--- @include "now"\nlocal sweep = now\n',
        include_now='--- @include "keys"\nlocal now = keys\n',
        include_keys="local keys = 1\n",
    )
    code = [line for line in load("admit", folder).source.splitlines() if line.startswith("local")]
    assert code == ["local keys = 1", "local now = keys", "local sweep = now", "local function admit()"]


def test_include_circle_is_refused(lua):
    """Includes that go in a circle are an error that shows the circle."""
    folder = lua(
        admit=HEADER + '--- @include "a"\n' + BODY,
        include_a='--- @include "b"\n',
        include_b='--- @include "a"\n',
    )
    with pytest.raises(ScriptError, match="a > b > a"):
        load("admit", folder)


def test_include_missing_is_refused(lua):
    """An include that is not there is an error that names who wants it and what there is."""
    folder = lua(admit=HEADER + '--- @include "nwo"\n' + BODY, include_now="")
    with pytest.raises(ScriptError, match=r"nwo\.lua, which .*admit\.lua includes; there are: now"):
        load("admit", folder)


@pytest.mark.parametrize(
    "line",
    ["--- @include now", "--- @include 'now'", '-- @include "now"', '  --- @include "now"', '--- @include "../now"'],
)
def test_include_written_otherwise_is_refused(lua, line):
    """A line that looks like an include and is none would be a silent comment: it is refused, by its number."""
    folder = lua(admit=f"{HEADER}{line}\n{BODY}", include_now="")
    with pytest.raises(ScriptError, match=r"admit\.lua:16: an include is a line of its own"):
        load("admit", folder)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (BODY, "no header"),
        ("\n" + HEADER + BODY, "no header"),
        ("-- a comment\n" + HEADER + BODY, "no header"),
        ("--[[\n]]\n" + BODY, "no header"),
        ("--[[\n\n]]\n" + BODY, "first line is the script's promise"),
        ("--[[\n  Guarantees: all.\n  Reply: x\n]]\n", "first line is the script's promise"),
        (HEADER.replace("]]", "") + BODY, "no header"),
        (with_line("  Guarantees: live", "  It is sure that live"), "no line that begins with Guarantees:"),
        ("--[[\n  Promise.\n  Guarantees: all.\n]]\nreturn 1\n", "no line that begins with Reply:"),
        (with_line("KEYS[2] dramatiq", "KEYS[3] dramatiq"), r"should be KEYS\[2\]"),
        (with_line("KEYS[1] root ", "KEYS[0] root "), r"should be KEYS\[1\]"),
        (with_line("ARGV[2] cost", "ARGV[1] cost"), r"should be ARGV\[2\]"),
        (with_line("ARGV[2] cost", "ARGV[3] cost"), r"should be ARGV\[2\]"),
        (with_line("ARGV[2] cost", "ARGV[2] now_ms"), "of that name already"),
        (with_line("ARGV[2] cost", "ARGV[2] Cost"), "malformed"),
        (with_line("ARGV[2] cost", "ARGV[2]cost"), "malformed"),
        (with_line("ARGV[2] cost", "ARGV[n] cost"), "malformed"),
        (with_line("ARGV[2] cost", "ARGV[2]"), "malformed"),
        (with_line("ARGV[1] now_ms ", "ARGV[1...] now_ms "), "takes all that follow"),
        (with_line("-1 ENDPOINT_FULL", "0 ENDPOINT_FULL"), "of that code or name already"),
        (with_line("-1 ENDPOINT_FULL", "-1 ADMITTED"), "of that code or name already"),
        (with_line("-1 ENDPOINT_FULL", "-1 endpoint_full"), "malformed"),
        (with_line("-1 ENDPOINT_FULL", "+1 ENDPOINT_FULL"), "malformed"),
        (with_line("-12 PAUSED", "-12"), "malformed"),
        (with_line("  ARGV[2] cost\n", "  KEYS[3] late\n  ARGV[2] cost\n"), "out of place"),
        (with_line("   -12 PAUSED\n", "   -12 PAUSED\n  ARGV[3] late\n"), "out of place"),
        (with_line("   -12 PAUSED\n", "   -12 PAUSED\n  Reply: again\n"), "out of place"),
        (with_line("  KEYS[1]", "  Guarantees: more\n  KEYS[1]"), "out of place"),
        (HEADER + BODY + "local x = ARGV[3]\n", r"uses ARGV\[3\], which the header does not list"),
        (HEADER + BODY + "local x = KEYS[0]\n", r"uses KEYS\[0\], which the header does not list"),
    ],
)
def test_header_that_does_not_hold_is_refused(lua, text, complaint):
    """A header that is missing, malformed, out of order or says less than the code uses is an error with the file."""
    folder = lua(admit=text)
    with pytest.raises(ScriptError, match=rf"admit\.lua: .*{complaint}"):
        load("admit", folder)


def test_use_in_a_comment_is_no_use(lua):
    """A comment may speak of an argument that is not there."""
    text = HEADER + "-- once there was ARGV[3]\n--[[ and KEYS[7] ]]\n" + BODY
    assert load("admit", lua(admit=text)).args == ("now_ms", "cost")


def test_script_missing_is_refused(lua):
    """A script that is not there is an error that lists those that are."""
    with pytest.raises(ScriptError, match="there are: admit, finish"):
        load("amdit", lua(admit=HEADER, finish=HEADER))


def test_names_lists_scripts_and_no_includes(lua, tmp_path):
    """Only whole scripts have a name here; a folder that does not exist has none."""
    assert names(lua(finish="", admit="", include_now="")) == ("admit", "finish")
    assert names(tmp_path / "nowhere") == ()


# ---------------------------------------------------------------------- the package's own


@pytest.mark.parametrize("name", names())
def test_packages_script_has_a_sound_header(name):
    """Each script of the package says what it takes and answers."""
    assert isinstance(load(name), Script)


def test_packages_library_loads_on_the_server(valkey):
    """All scripts of the package, on the server under test."""
    assert valkey.call("FUNCTION", "LOAD", "REPLACE", library().source) == library().name.encode()


def test_write_gives_luacheck_what_the_server_gets(lua, tmp_path):
    """The written file is the library, its first line a comment; what is no script any more is gone."""
    folder = lua(admit=HEADER + '--- @include "start"\n' + BODY, include_start=START)
    target = tmp_path / "build" / "lua"
    target.mkdir(parents=True)
    (target / "gone.lua").write_text("")
    assert scripts.write(target, folder) == target / "guard.lua"
    assert (target / "guard.lua").read_text() == "-- " + library(folder).source
    assert [path.name for path in target.iterdir()] == ["guard.lua"]


def test_command_writes_and_lists(tmp_path, capsys):
    """The command that `make check` runs writes the library and lists its functions."""
    scripts.main(["--write", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["guard.lua"]
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(library().functions.values())
