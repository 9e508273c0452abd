"""The formats of strings in JSON Schema, as regular expressions in Rust's syntax that match whole texts.

An expression matches only texts of its format, but not all of them: IRIs have ASCII characters only, and times no leap
second. One exception: the total length of a host name is not limited.

Source: JSON Schema, draft 2020-12, validation vocabulary, section 7.3; RFC 3339, 3986, 4122, 4291, 5321, 6901.
"""

from __future__ import annotations

from collections.abc import Mapping

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+\-]{_HOUR}:[0-5][0-9])"

_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"

_LABEL = r"(?:[0-9A-Za-z]{1,63}|[0-9A-Za-z](?:\-?[0-9A-Za-z]){1,31})"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[0-9A-Za-z!\#$%\&'*+\-\/=?\^_{|}\~]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
# By the number of groups before the gap; at most seven groups before and after it together.
_GAPS = "|".join(
    f"{f'{_GROUP}(?::{_GROUP}){{{before - 1}}}' if before else ''}::"
    f"{f'(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?' if before < 7 else ''}"
    for before in range(8)
)
_IPV6 = f"(?:{_GROUP}(?::{_GROUP}){{7}}|{_GAPS})"

_HEX = "[0-9A-Fa-f]"
_PLAIN = r"0-9A-Za-z._\~!$\&'()*+,;=\-"
_PCHAR = f"(?:[{_PLAIN}:@]|%{_HEX}{{2}})"
_AUTHORITY = rf"(?:(?:[{_PLAIN}:]|%{_HEX}{{2}})*@)?(?:\[{_IPV6}\]|(?:[{_PLAIN}]|%{_HEX}{{2}})*)(?::[0-9]*)?"
_PATHS = rf"\/\/{_AUTHORITY}(?:\/{_PCHAR}*)*|\/(?:{_PCHAR}+(?:\/{_PCHAR}*)*)?"
_ENDS = rf"(?:\?(?:{_PCHAR}|[\/?])*)?(?:\#(?:{_PCHAR}|[\/?])*)?"
_URI = rf"[A-Za-z][0-9A-Za-z+\-.]*:(?:{_PATHS}|{_PCHAR}+(?:\/{_PCHAR}*)*)?{_ENDS}"
_RELATIVE = rf"(?:{_PATHS}|(?:[{_PLAIN}@]|%{_HEX}{{2}})+(?:\/{_PCHAR}*)*)?{_ENDS}"
_REFERENCE = f"(?:{_URI}|{_RELATIVE})"

_POINTER = r"(?:\/(?:[^\/\~]|\~[01])*)*"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _URI,
    "uri-reference": _REFERENCE,
    "iri": _URI,
    "iri-reference": _REFERENCE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:\#|{_POINTER})",
}
# Formats without an expression here. Any other name of a format is an annotation.
NOT_ENFORCED = frozenset({"idn-email", "idn-hostname", "uri-template", "regex"})
