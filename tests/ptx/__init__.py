"""nvcc's PTX of the kernels, executed on the CPU."""
