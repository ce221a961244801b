"""The aggregator's database: jobs, rounds, tasks, agents, events."""
