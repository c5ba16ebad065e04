"""Decode on NVIDIA GPUs whose tiles of 8 and 4 bits stay in registers, from the load to the tensor core, in Gluon."""
