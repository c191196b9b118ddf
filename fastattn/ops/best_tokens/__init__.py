"""What a search wants to know of a step's logits."""
