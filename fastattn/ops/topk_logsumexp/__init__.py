"""The largest logits of each row and the row's logsumexp, for greedy and beam search."""
