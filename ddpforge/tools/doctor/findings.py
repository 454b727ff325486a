"""Findings of the doctor: an observation, its severity, and its fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Finding", "Level", "error", "merged", "note", "ok", "warning"]

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """Observation: an "error" ends or spoils a run, a "warning" may; a "note" is information. `fix` is the remedy."""

    level: Level
    what: str
    fix: str = ""
    hosts: tuple[str, ...] = ()  # empty: it concerns all hosts together

    def as_dict(self) -> dict[str, Any]:
        """Returns the finding for JSON."""
        return {"level": self.level, "what": self.what, "fix": self.fix or None, "hosts": list(self.hosts)}


def ok(what: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding("ok", what)


def note(what: str) -> Finding:
    """Returns a finding that is only information."""
    return Finding("note", what)


def warning(what: str, fix: str) -> Finding:
    """Returns a finding about a problem that may spoil a run, or make it slow."""
    return Finding("warning", what, fix)


def error(what: str, fix: str) -> Finding:
    """Returns a finding about a problem that will end a run."""
    return Finding("error", what, fix)


def merged(gathered: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Merges the findings of all hosts, by host name; a finding of several hosts appears once, with their names."""
    found: dict[Finding, list[str]] = {}
    for host, findings in gathered:
        for finding in findings:
            found.setdefault(finding, []).append(host)
    return [Finding(each.level, each.what, each.fix, tuple(dict.fromkeys(hosts))) for each, hosts in found.items()]
