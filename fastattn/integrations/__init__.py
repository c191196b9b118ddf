"""fastattn as the attention of other packages' models."""
