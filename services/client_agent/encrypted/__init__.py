"""The institution's side of encrypted blocks: the secret key is made here, and stays."""
