"""The kernels of TRITON; importing them imports triton."""
