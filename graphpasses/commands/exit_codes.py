"""Exit codes, as diff and cmp have them."""

__all__ = ["EXIT_DIFFERENT", "EXIT_EQUAL", "EXIT_OK", "EXIT_TROUBLE"]

EXIT_OK = EXIT_EQUAL = 0
EXIT_DIFFERENT = 1
EXIT_TROUBLE = 2
