"""Benchmarks: measurements with a bound on what they may come to. Every one of them takes the same form.

    python -m benchmarks.NAME [--json PATH] [--quick]

prints a table of what was measured and each bar that does not hold, and leaves with exit code 1 where one does not.
`--json` writes the same as `{"about": {...}, "rows": [{column: value}], "bars": [{name, value, limit, holds}]}`. A bar
holds where its value is at most its limit. `--quick` measures little and sets no bar on time: it shows that the
benchmark works, on a machine with other things to do. docs/performance.md explains and shows the figures.
"""
