"""Exit codes, as diff and cmp have them."""

EXIT_OK = EXIT_EQUAL = 0
EXIT_DIFFERENT = 1
EXIT_TROUBLE = 2
# A shell says so of a program that Control-C ended.
EXIT_INTERRUPTED = 130
# And of one that SIGPIPE ended: what read its output has gone, as head does.
EXIT_BROKEN_PIPE = 141
# By the verdict of a comparison.
EXIT_OF = {"equal": EXIT_EQUAL, "different": EXIT_DIFFERENT, "not compared": EXIT_TROUBLE}
