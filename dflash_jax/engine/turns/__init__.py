"""What a turn depends on besides earlier turns: who may post it, and how it is recorded."""
