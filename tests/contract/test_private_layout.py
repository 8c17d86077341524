"""What the guard relies on in Dramatiq's private parts, in the installed Dramatiq and in the oldest supported one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from tests.support.layout import CHECKS

ROOT = Path(__file__).resolve().parents[2]


def oldest():
    """The oldest Dramatiq that the package says it supports."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = [one.removeprefix("dramatiq>=") for one in dependencies if one.startswith("dramatiq>=")]
    return found if found.count(".") == 2 else f"{found}.0"


def folder_with(version):
    """A folder that holds this Dramatiq alone, installed once and kept under build/."""
    folder = ROOT / "build" / f"dramatiq-{version}"
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="dramatiq-", dir=folder.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--timeout", "10", "--retries", "1", "--target", str(fresh)]
    done = subprocess.run([*command, *options, f"dramatiq=={version}"], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(fresh)
        last = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        pytest.skip(f"Dramatiq {version} could not be installed from the package index: {last}")
    try:
        fresh.rename(folder)
    except OSError:  # another run of the tests was faster
        shutil.rmtree(fresh)
    return folder


@pytest.fixture(scope="session", params=["installed", "oldest"])
def report(request, valkey, tmp_path_factory):
    """All checks, done by a process that imports this Dramatiq."""
    path = [str(ROOT)] if request.param == "installed" else [str(folder_with(oldest())), str(ROOT)]
    out = tmp_path_factory.mktemp("layout") / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.layout", valkey.database_url(0), str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    if request.param == "oldest":
        assert found["version"] == oldest()
        assert Path(found["from"]).is_relative_to(path[0])
    return found["checks"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_layout(report, name):
    """The check's own docstring says what must hold."""
    assert report[name] == "", CHECKS[name].__doc__
