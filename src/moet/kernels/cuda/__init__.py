"""CUDA C++ kernels for the routed experts, compiled at first use."""
