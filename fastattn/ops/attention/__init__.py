"""Tiled masked softmax attention."""
