"""`python -m dsv4_jax`, the same as `dsv4-jax`."""

import sys

from dsv4_jax.signals import end_at_once
from dsv4_jax.standard_streams import open_standard_streams, say


def main() -> int:
    """Runs `dsv4_jax.cli.main`; its import takes seconds, in which Ctrl-C may come as well.

    Returns:
      Its status; 2 if jax refuses a variable of the environment, and in the place of 0 if standard
      error could not take what was said.
    """
    notes = open_standard_streams()
    try:
        with end_at_once("dsv4-jax"):
            from dsv4_jax import cli
    except ValueError as error:  # of jax, which reads JAX_* as it is imported
        say(f"dsv4-jax: the environment must be one that jax takes: {error}")
        return 2
    status = cli.main()
    return status or 2 * notes.have_lost


if __name__ == "__main__":
    sys.exit(main())
