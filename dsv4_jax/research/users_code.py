"""What a user's own code raises, told by the frames of that code; ours and jax's are left out."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator

_NOT_THE_USERS = {"dsv4_jax", "pallas_kernels", "jax", "jaxlib", "flax", *sys.stdlib_module_names}


@contextlib.contextmanager
def telling_users_frames() -> Iterator[None]:
    """Turns an error of a user's function into one that names the function and its lines.

    SystemExit is such an error too. One that came through none of the user's code goes on as it is.

    Raises:
      ValueError: the user's code raised something.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = users_frames(error)
        if not frames:
            raise
        first = frames[0]
        raise ValueError(
            f"{first.name} ({first.filename}, line {first.lineno}) raised {describe_error(error)}"
        ) from error


def describe_error(error: BaseException) -> str:
    """Its type and message, then the lines of the user's code that it came through, if any."""
    lines = "".join(traceback.StackSummary.from_list(users_frames(error)).format())
    return f"{type(error).__name__}: {error}\n{lines}".rstrip()


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error that are the user's code, outermost first."""
    found = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        root = frame.f_globals.get("__name__", "").partition(".")[0]
        if root not in _NOT_THE_USERS:
            found.append((frame, line))
    return list(traceback.StackSummary.extract(iter(found)))
