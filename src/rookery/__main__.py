"""`python -m rookery` is the `rookery` command."""

from rookery.cli import main

if __name__ == "__main__":
    main()
