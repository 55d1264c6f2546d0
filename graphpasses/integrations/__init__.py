"""graphpasses inside other projects' trainers; each module loads its project."""
