"""The fused CUDA kernels. Importing this package imports Triton."""
