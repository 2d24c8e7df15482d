"""Training: the corpus, the target, the drafter and the command that makes the shipped pair."""
