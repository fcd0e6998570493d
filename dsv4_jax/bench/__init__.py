"""Measures the model at full size: random weights, filled caches, timed steps, and their floors."""
