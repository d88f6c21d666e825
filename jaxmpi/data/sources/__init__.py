"""Sources of examples: a file each, the protocol in `base`, their names in `registry`."""
