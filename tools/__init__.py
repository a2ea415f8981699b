"""What maintainers run: recorded runs and their tables, profiles, sanitizers, drawings, the zoo."""
