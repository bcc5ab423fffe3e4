"""docs/benchmarks.md and its pictures, from the results of the benchmarks: nothing is measured here."""
