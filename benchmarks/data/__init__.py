"""Measured numbers that benchmarks draw from, and the programs that measure them."""
