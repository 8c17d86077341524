"""The values of this deployment: what is guarded, how much of it there is, and where the state is kept."""

from __future__ import annotations

import os
from pathlib import Path

from dotenv import dotenv_values

from guard_middleware.config import GuardSettings

MODELS_FILE = Path(__file__).with_name("models.json")
ENV_FILE = Path(__file__).with_name("deployment.env")
_MODELS = {"GUARD_MODELS", "GUARD_MODELS_FILE"}


def deployment() -> GuardSettings:
    """The settings of this deployment: its files, unless the environment says otherwise.

    Each variable of the environment wins over the same line of ``deployment.env``, and GUARD_MODELS or
    GUARD_MODELS_FILE over ``models.json``. Blank counts as not set, in both.

    Raises:
        ConfigurationError: if files and environment together cannot work; the message names each field.
    """
    said = {variable for variable, value in os.environ.items() if value.strip()}
    if said & _MODELS:
        said |= _MODELS  # naming the models in one way takes the place of naming them in the other
    lines = dotenv_values(ENV_FILE, interpolate=False)
    values = {key: value for key, value in lines.items() if value and value.strip() and key not in said}
    if not _MODELS & {*said, *values}:
        values["GUARD_MODELS_FILE"] = str(MODELS_FILE)
    return GuardSettings(**values)
