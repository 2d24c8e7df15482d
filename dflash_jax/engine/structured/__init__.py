"""Structured output: grammars, and the processes in which they are compiled."""
