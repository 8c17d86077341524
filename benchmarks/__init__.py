"""The figures of the design, side by side with stock Dramatiq: ``make bench``, or ``python -m benchmarks``."""
