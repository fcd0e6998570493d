"""Benchmarks: full-size models with random weights, and kernels beside other projects' kernels."""
