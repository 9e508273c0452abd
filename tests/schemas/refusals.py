"""Refusals of schemas, by what they are about."""

from __future__ import annotations

import re

NOT_ENFORCED = re.compile(
    r"(?:compiles: )?(?:(?P<place>[^:]*): )?(?P<keyword>\S+) cannot be enforced, since (?P<why>.*)", re.DOTALL
)
WRONG_VALUE = re.compile(r"(?:^|: )(\S+) is .*, got ", re.DOTALL)


def keyword_of(reason: str) -> str:
    """Return the keyword that a refusal is about, or in brackets what else."""
    found = NOT_ENFORCED.search(reason)
    if found is not None:
        return found["keyword"]
    if "no value meets it" in reason or "nsatisfiable" in reason:
        return "(no value meets it)"
    if "are not disjoint" in reason:
        return "patternProperties"
    if "combinations" in reason:
        return "(too many combinations)"
    if "circular references" in reason:
        return "(recursive beside patternProperties)"
    wrong = WRONG_VALUE.search(reason)
    return f"(no schema: {wrong[1]})" if wrong is not None else f"(other: {reason[:60]})"
