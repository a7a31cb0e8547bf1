"""Rematerialisation and paging as a mixed-integer program: Checkmate's and POET's planners.

Read `graph.py` (what is planned), `program.py` (the program and its solver), and `rounding.py` (when it is
too large to solve).
"""
