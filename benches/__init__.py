"""Benchmarks of the seam, each beside what a user would pick instead: `make bench`."""
