"""The subcommands of ``graphpasses``, one file each; a function returns the exit code."""
