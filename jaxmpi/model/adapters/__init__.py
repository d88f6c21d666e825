"""Models of other libraries, made into the contract of `jaxmpi.model`: a file each, and what they share in `common`."""
