"""APIs of other libraries on top of jaxmpi, so that a program changes its import line only."""
