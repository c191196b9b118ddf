"""The roles of the Hopper attention kernels as coroutines, to play their barriers through."""
