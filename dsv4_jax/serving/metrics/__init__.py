"""Metrics: counters, gauges and histograms of an engine, and the same for Prometheus."""
