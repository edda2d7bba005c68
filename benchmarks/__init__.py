"""Measurements of our models. `python -m benchmarks --help` for speed and memory; the other files say what they do."""
