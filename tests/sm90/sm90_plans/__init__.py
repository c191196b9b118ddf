"""What thread blocks of the Hopper attention kernels compute, from the kernels' own headers."""
