"""A folder of class folders becomes tar shards: ``python tools/shard.py SRC OUT`` is ``fastdata shard SRC OUT``."""

import sys

from fastdata.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["shard"]
    main()
