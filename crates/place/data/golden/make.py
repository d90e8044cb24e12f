#!/usr/bin/env python3
"""Writes sketches of the reference (Apache DataSketches for C++, `pip install datasketches`), beside which tests put ours.

Each is of the contents 1..N, with 2^10 hashes: compact, ordered, with the default seed.
"""

from pathlib import Path

from datasketches import update_theta_sketch

for contents in [0, 1, 500, 100_000]:
    sketch = update_theta_sketch(lg_k=10)
    for content in range(1, contents + 1):
        sketch.update(content)
    sketch.trim()
    Path(__file__).with_name(f"theta-{contents}.bin").write_bytes(sketch.compact(ordered=True).serialize())
