"""Training: a drafter for a target, on the target's own answers."""
