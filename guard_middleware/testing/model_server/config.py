"""What a fake model server is made of: endpoints, and the host whose memory they share.

All values are frozen and refuse unknown keys, so that a misspelled limit cannot pass for no limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from guard_middleware.testing.model_server.script import Script, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

BUSY_TEXT = "server busy, please try again. maximum pending requests exceeded"


class Frozen(BaseModel):
    """A value that is checked once, when it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FakeEndpoint(Frozen):
    """One served model on a port of its own.

    Attributes:
        name: how tests, scripts and statistics call the endpoint.
        model: the model name that it serves (default: the name); a request for another one gets 404, as in vLLM.
        port: 0 for a free one, which is then kept also while the endpoint refuses connections.
        base_ms: how long a call takes on a host that is not overloaded. A request's header ``x-fake-ms`` or its body
            field ``fake_ms`` wins over it.
        max_num_seqs: most calls that run at once, the rest wait inside the server; ``None`` for no bound.
        refuse_above: a call that would make more than so many open is answered at once with ``refuse_status`` and
            ``{"error": refuse_text}``; ``None`` for never.
        refuse_status: status of that answer; some servers say 503, older ones 500 with the same text.
        refuse_text: text of that answer.
        oom_above: a call that would make more than so many open is answered at once with 500 and a body that says
            "CUDA out of memory" and quotes the prompt; ``None`` for never.
        chunks: content chunks in a streamed answer; a request's header ``x-fake-chunks`` wins over it.
        dimensions: length of an embedding, unless the request says otherwise.
        old_metric_names: publish the cache gauge under its old name and neither the ``engine`` label nor the reasons.
    """

    name: str = Field(min_length=1)
    model: str = ""
    port: int = Field(default=0, ge=0, le=65535)
    base_ms: float = Field(default=50.0, ge=0)
    max_num_seqs: int | None = Field(default=None, ge=1)
    refuse_above: int | None = Field(default=None, ge=0)
    refuse_status: int = Field(default=503, ge=200, le=599)
    refuse_text: str = BUSY_TEXT
    oom_above: int | None = Field(default=None, ge=0)
    chunks: int = Field(default=4, ge=0)
    dimensions: int = Field(default=8, ge=1)
    old_metric_names: bool = False

    @property
    def served_model(self) -> str:
        """The model name that a request must ask for."""
        return self.model or self.name


class HostMemory(Frozen):
    """The memory that all endpoints share, in units of cost (a call costs 1 unless ``x-fake-cost`` says otherwise).

    Only calls that run use memory; calls that wait inside the server behind ``max_num_seqs`` do not.

    Attributes:
        knee: above so much running at once, all calls slow down in proportion; ``None`` for never.
        edge: a call that would make more than so much run takes the host down; ``None`` for never.
        oom_above: a call that would make the cost open over all endpoints larger is answered at once with 500
            "CUDA out of memory", whichever endpoint it came to; ``None`` for never.
        dark_s: how long a dead host refuses connections.
        loading_s: how long it answers 503 "loading" after that.
        death: what clients see: ``drop`` closes open connections without a further byte, ``reset`` resets them, and
            both refuse new ones; ``silent`` leaves all of them open without a byte, and resets them when the dark ends.
    """

    knee: float | None = Field(default=None, gt=0)
    edge: float | None = Field(default=None, gt=0)
    oom_above: int | None = Field(default=None, ge=0)
    dark_s: float = Field(default=1.0, ge=0)
    loading_s: float = Field(default=1.0, ge=0)
    death: Literal["drop", "reset", "silent"] = "drop"


class ServerConfig(Frozen):
    """Everything that one server process needs to know; its JSON form is what ``--config`` reads.

    Attributes:
        endpoints: at least one; their names differ.
        host: the memory that they share.
        script: what goes wrong, and when; counted from the start of the server.
        control_port: port for statistics and scripts only, which no fault touches; 0 for a free one.
        max_seconds: the server ends itself after so long; ``None`` for never.
    """

    endpoints: tuple[FakeEndpoint, ...] = Field(min_length=1)
    host: HostMemory = HostMemory()
    script: Script = Script()
    control_port: int = Field(default=0, ge=0, le=65535)
    max_seconds: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        names = [endpoint.name for endpoint in self.endpoints]
        if len(set(names)) != len(names):
            msg = f"endpoints: two have the same name in {names}"
            raise ValueError(msg)
        check_names(self.script.steps, names)
        return self


def check_names(steps: Iterable[Step], names: list[str]) -> None:
    """Refuse a script that speaks of an endpoint that is not there: its step would never match.

    Args:
        steps: the steps to check.
        names: names of the endpoints that exist.

    Raises:
        ValueError: naming the unknown endpoint and the known ones.
    """
    for step in steps:
        if step.endpoint is not None and step.endpoint not in names:
            msg = f"script: no endpoint {step.endpoint!r}, there are {names}"
            raise ValueError(msg)
