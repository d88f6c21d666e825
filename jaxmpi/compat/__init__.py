"""Faces of other libraries on jaxmpi's engine, so that a program changes its import line only."""
