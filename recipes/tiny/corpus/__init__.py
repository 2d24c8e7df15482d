"""The text the shipped pair is made from: seeded conversations, standard library sources."""
