"""What `scripts/benchmark.py` measures: one module a group of rows."""
