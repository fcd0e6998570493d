"""What all processes of a mesh know of the memory that their hosts have free."""

import pytest

from dsv4_jax.runtime import Memory
from dsv4_jax.serving import least_memory


class Hosts:
    """One process, which hears what the others have."""

    def __init__(self, machines, free, totals):
        self.heard = iter([machines, free, totals])

    def share(self, value):
        return next(self.heard)


@pytest.mark.parametrize(
    ("machines", "free", "found"),
    [
        ([1, 2], [100, 70], (70, 1)),
        ([1, 1], [100, 100], (50, 0)),
        ([1, 1, 2], [100, 90, 46], (45, 1)),
        ([1, 1, 2], [100, 90, 40], (40, 2)),
        ([1, 2], [100, -1], None),
    ],
)
def test_it_is_the_part_of_the_process_that_has_least(machines, free, found):
    """Processes of one machine share what that has free."""
    hosts = Hosts(machines, free, [200 + number for number in range(len(free))])
    memory = least_memory.least_memory(hosts, Memory("this machine", 1, 2))
    if found is None:
        assert memory is None
    else:
        part, process = found
        name = f"the machine of process {process}, for each of its processes,"
        assert memory == Memory(name, part, 200 + process, is_host=True)


def test_a_machine_has_one_number():
    assert least_memory._machine() == least_memory._machine()
