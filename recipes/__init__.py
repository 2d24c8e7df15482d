"""How models that come with this repository were made. Runs from a checkout; not installed."""
