"""Benchmarks: Farandole and its rivals side by side, in one run and in turn. No training logic."""
