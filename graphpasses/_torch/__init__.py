"""The only package that uses private torch APIs; README.md lists each, why, and for which versions."""
