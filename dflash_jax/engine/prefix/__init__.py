"""The prefix cache: segments of prompts in memory and on disk."""
