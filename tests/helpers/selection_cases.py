"""Scores to select among, as (requests, entries of each), of tests, benchmarks and AOT cases."""

SHAPES = [(1, 262144), (8, 65536), (8, 262144), (32, 16384), (64, 4096), (64, 16384), (64, 65536)]
