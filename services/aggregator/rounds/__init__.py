"""The state machine of jobs, rounds and tasks. Every change is a compare-and-set in the database."""
