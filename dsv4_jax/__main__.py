"""`python -m dsv4_jax`, the same as `dsv4-jax`."""

import sys

from dsv4_jax.signals import end_at_once


def main() -> int:
    """Runs `dsv4_jax.cli.main`; its import takes seconds, in which Ctrl-C may come as well."""
    with end_at_once("dsv4-jax"):
        from dsv4_jax import cli
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
