"""The commands, one module for each group; `fastdata.cli` collects them."""
