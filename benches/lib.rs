//! Benchmarks of the CPU back end; see the `[[bench]]` targets.
