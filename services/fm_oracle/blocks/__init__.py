"""The oracle's service on ciphertexts: sessions with keys, passes of samples through a student's blocks, releases."""
