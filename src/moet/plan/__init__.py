"""Geometry × hardware: what fits where, and how fast. docs/planner.md has the formulas."""
