"""Native kernels for CPUs: products of few tokens, faster than XLA's."""
