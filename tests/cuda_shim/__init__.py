"""Kernels of accel/cuda run on a processor: a device for the launchers, strict about mistakes."""
