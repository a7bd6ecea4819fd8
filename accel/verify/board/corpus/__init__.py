"""Kernels to be judged, untyped as people write them."""
