"""`python -m headrace`, which is also what torchrun starts."""

from headrace.cli import main

if __name__ == "__main__":
    main()
