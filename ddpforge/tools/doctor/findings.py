"""A finding: what was seen, how bad it is, and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Finding", "Level", "error", "merged", "note", "ok", "warning"]

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """An "error" ends a run or spoils it, a "warning" may; a "note" is worth knowing. `fix` says how to mend it."""

    level: Level
    what: str
    fix: str = ""
    hosts: tuple[str, ...] = ()  # none: it is about all of them together

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"level": self.level, "what": self.what, "fix": self.fix or None, "hosts": list(self.hosts)}


def ok(what: str) -> Finding:
    """All is well."""
    return Finding("ok", what)


def note(what: str) -> Finding:
    """Something worth knowing."""
    return Finding("note", what)


def warning(what: str, fix: str) -> Finding:
    """Something that may spoil a run, or make it slow."""
    return Finding("warning", what, fix)


def error(what: str, fix: str) -> Finding:
    """Something that will end a run."""
    return Finding("error", what, fix)


def merged(told: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """The findings of all hosts, by host name; what several have found alike is said once."""
    found: dict[Finding, list[str]] = {}
    for host, findings in told:
        for finding in findings:
            found.setdefault(finding, []).append(host)
    return [Finding(each.level, each.what, each.fix, tuple(dict.fromkeys(hosts))) for each, hosts in found.items()]
