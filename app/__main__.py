"""`python -m app` is `octavo`."""

from app.cli import main

if __name__ == "__main__":
    main()
