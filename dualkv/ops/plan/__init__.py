"""What kernels are told to do, planned on the host: work items of forward, paths and backward, and their schedule."""
