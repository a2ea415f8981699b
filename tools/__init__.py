"""For people who tune kernels and build images: benchmarks, precompiling, profiling."""
