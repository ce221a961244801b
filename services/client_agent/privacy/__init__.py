"""Differential privacy at an institution: what is clipped, and the noise on what leaves.

gaussian      exact samples of the discrete Gaussian
lattice       vectors of bounded length as integers
mechanisms    noisy updates and noisy statistics
"""
