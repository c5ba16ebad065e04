"""The kernels of `attnplug.ops.triton`; importing one imports triton."""
