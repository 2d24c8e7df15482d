"""Words that switch something on or off by an environment variable."""

YES, NO = ("on", "1", "true", "yes"), ("off", "0", "false", "no")
