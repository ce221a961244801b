"""Studies in one process: the agents' trainers and the aggregator's strategies, without services between them.

It plays all parties at once, so it imports them all and none of them imports it. The same job on the same embeddings
gives the same models here as over the services, bit for bit, on one machine with one thread.

    subjects    what is studied: domains with their embeddings and labels
    methods     the methods of the comparison, and their settings
    simulation  all rounds of one job
    cells       one job's figures: a row of the N x N matrix
    runner      all jobs of a study, each kept in a file, so that a study that was stopped goes on
    summary     G, P and C over the seeds, and everything else in one document
"""
