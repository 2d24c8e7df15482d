"""Training of drafters, and of the shipped pair."""
