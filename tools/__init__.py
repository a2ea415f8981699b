"""Programs for maintainers: recorded runs and their tables, profiles, sanitizers, drawings, the zoo."""
