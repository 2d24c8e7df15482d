"""Helpers that know nothing of models: files, processes, memory, terminals."""
