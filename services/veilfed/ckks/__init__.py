"""The arithmetic of CKKS ciphertexts that the oracle and the agents share: residues, transforms, parameters.

Nothing here has a secret. Keys are made, and ciphertexts opened, at an agent alone (client_agent.encrypted).
"""
