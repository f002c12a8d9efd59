"""The lab: six names, their contracts as tests, a skeleton to fill in, and faults the tests must find."""
