"""python -m loadgen: the load generator without the server."""

from loadgen.cli import main

if __name__ == "__main__":
    main()
