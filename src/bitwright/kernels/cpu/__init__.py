"""The fused CPU kernels. Importing this package imports Numba."""
