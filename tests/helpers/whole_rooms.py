"""Workers of pytest-xdist take whole rooms, whose files share programs that each would compile.

`--dist loadfile` hands out file by file otherwise, and two workers then trace, lower and load the
programs of a room each for itself.
"""

import functools
import pathlib
import re

from xdist.scheduler import LoadFileScheduling

ROOT = pathlib.Path(__file__).parents[2]


class WholeRooms(LoadFileScheduling):
    """As `LoadFileScheduling`, of rooms."""

    def _split_scope(self, nodeid):
        return room_of(super()._split_scope(nodeid))


@functools.cache
def room_of(file):
    """What is handed out together with a file: its room's files whose marker is the same.

    Folders of packages are rooms; a file beside them stands alone. Files of any room that take the
    engine of the tests of the server, or that of `helpers/serving.py`, go with the files that do so
    already, or two workers would compile its step at once.
    """
    text = (ROOT / file).read_text()
    room = "/".join(file.split("/")[:3])  # tests/dsv4_jax/serving, tests/pallas_kernels/mix
    if "warm_engine" in text:
        room = "tests/dsv4_jax/serve"
    elif re.search(r"^from helpers\.serving import .*\bmake_engine\b", text, re.MULTILINE):
        room = "tests/dsv4_jax/serving"
    is_unoptimised = "mark.unoptimised" in text
    return f"{room}, unoptimised" if is_unoptimised else room
