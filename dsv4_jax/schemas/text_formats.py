"""Formats of JSON schemas, as the patterns and lengths that hold them.

llguidance has formats of its own, which let pass dates and leap seconds that there are not, and
are no help where a text is not written as JSON. These are regular expressions of Rust's dialect.
"""

from __future__ import annotations

from typing import Any


def _whole(expression: str, **limits: int) -> dict[str, Any]:
    return {"pattern": f"^(?:{expression})$"} | limits


_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # few programs know a year 0
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_COUNT = "[0-9]{1,6}"
_TIME_SPAN = f"{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S"
_DATE_SPAN = f"{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{7}}{_H}",
        f"(?:{_H}:){{1,7}}:",
        *(f"(?:{_H}:){{1,{7 - after}}}(?::{_H}){{1,{after}}}" for after in range(1, 7)),
        f":(?::{_H}){{1,7}}|::",
    ]
)
_URI_CHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=@:-]|%[0-9A-Fa-f]{2})"
_URI_HOST = "(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_URI_USER = "(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})"

FORMATS: dict[str, tuple[dict[str, Any], ...]] = {
    "date": (_whole(_DATE),),
    "time": (_whole(_TIME),),
    "date-time": (_whole(f"(?:{_DATE})T{_TIME}"),),
    "duration": (
        _whole(f"P(?:(?:{_DATE_SPAN})(?:T(?:{_TIME_SPAN}))?|T(?:{_TIME_SPAN})|{_COUNT}W)"),
    ),
    "email": (
        _whole(rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+", maxLength=254),
        _whole("[^@]{1,64}@[^@]*"),
    ),
    # A label with two hyphens in a row is of another alphabet, and has rules of its own.
    "hostname": (_whole(rf"{_LABEL}(?:\.{_LABEL})*", maxLength=253), _whole("[^-]+(?:-[^-]+)*")),
    "ipv4": (_whole(rf"{_OCTET}(?:\.{_OCTET}){{3}}"),),
    "ipv6": (_whole(_IPV6),),
    "uuid": (_whole("[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"),),
    "uri": (
        _whole(
            rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_URI_USER}*@)?{_URI_HOST}+(?::[0-9]{{1,5}})?"
            rf"(?:/{_URI_CHAR}*)*|{_URI_CHAR}(?:{_URI_CHAR}|/)*)"
            rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
        ),
    ),
}
"""What a text of each format is: all of the parts hold."""
