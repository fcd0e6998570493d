"""`python -m dsv4_jax`, the same as `dsv4-jax`."""

import sys

from dsv4_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
