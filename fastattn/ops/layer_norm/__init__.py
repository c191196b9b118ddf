"""Layer norm, residual add + layer norm, and RMS norm over the last dimension."""
