"""Closed forms from summed statistics, in float64: no agent, no round and no database in here.

statistics      the sums, and their exact total
cholesky        factorisation, solution, condition estimate
ridge           AFL: ridge regression, generalised cross-validation, shares of the degrees of freedom
gaussian        FedCGS: class means and a covariance
pairwise        AFL by its pairwise law, for comparison
"""
