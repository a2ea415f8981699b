"""Every kernel family under compute-sanitizer at edge shapes: `python -m tools.sanitize --json FILE`."""
