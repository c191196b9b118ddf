"""Work of thread blocks of the Hopper attention kernels, from the kernels' own headers."""
