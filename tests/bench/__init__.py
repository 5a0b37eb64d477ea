"""`make bench`: the figures of the real pair on this machine. See `tests.bench.bench` for the command."""
