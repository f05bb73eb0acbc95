"""``python -m fastdata``: the command line."""

from fastdata.cli import main

if __name__ == "__main__":
    main()
