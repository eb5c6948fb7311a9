"""Slow, obvious implementations to compare with; they import nothing of the package."""
