"""Kernels of layers: XLA's, Pallas' for GPUs, and native ones for CPUs."""
