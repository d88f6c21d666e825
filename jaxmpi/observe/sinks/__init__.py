"""Sinks: where lines of the record go besides the record.

In reading order: `base`, `files`, `services`, `registry`.
"""
