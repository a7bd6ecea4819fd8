"""An interpreter of PTX: what NVRTC makes of the CUDA kernels, executed on the processor."""
