"""Measured goals. Each module runs as `python -m benchmarks.NAME --json`; see `benchmarks.contract`."""
