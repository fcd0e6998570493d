"""AsyncEngine: a thread steps an engine (`stepper`), coroutines read what it leaves (`feed`)."""
