"""The hybrid cache: pytrees, and pure functions on them."""
