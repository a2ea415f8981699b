"""`python -m dualkv`."""

from dualkv.cli import main

main()
