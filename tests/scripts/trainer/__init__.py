"""A package that is run by `-m`."""

WIDTH = 192
