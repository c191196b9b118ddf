"""fastattn in models that others wrote."""
