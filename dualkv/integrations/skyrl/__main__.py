"""`python -m dualkv.integrations.skyrl`."""

from dualkv.integrations.skyrl.entrypoint import main

if __name__ == "__main__":
    main()
