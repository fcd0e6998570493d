"""`python -m dsv4_jax`, the same as `dsv4-jax`."""

import sys


def main() -> int:
    """Runs `dsv4_jax.cli.main`; its import takes seconds, in which Ctrl-C may come as well."""
    try:
        from dsv4_jax import cli
    except KeyboardInterrupt:
        print("dsv4-jax: interrupted", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
