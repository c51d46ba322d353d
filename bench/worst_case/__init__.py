"""Searches for the inputs on which a sample contributes the most, or its norm comes out too small.

python -m bench.worst_case --minutes 10
python -m bench.worst_case --replay bench/results/worst-case.json
"""
