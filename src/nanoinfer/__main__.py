"""`python -m nanoinfer`: the command line."""

from nanoinfer.cli import main

if __name__ == "__main__":
    main()
