"""Helpers independent of models: files, processes, memory, terminals."""
