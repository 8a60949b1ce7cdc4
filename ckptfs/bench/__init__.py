"""Benchmarks: workloads, engines in comparison, and results with the conditions they hold for."""
