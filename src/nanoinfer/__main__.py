"""`python -m nanoinfer`: the command line."""

from nanoinfer.cli import program

if __name__ == "__main__":
    program()
