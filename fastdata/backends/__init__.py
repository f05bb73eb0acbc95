"""The backends, one file each; `fastdata.registry` knows them by name and imports one only when it is asked for."""
